// The site's search runs in a worker, which browsers refuse to pages opened from a folder: there a hidden frame does its work.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      this.inside = frame.contentWindow;
      const told = (data) => {
        const event = new MessageEvent("message", { data });
        this.dispatchEvent(event);
        if (this.onmessage) this.onmessage(event);
      };
      this.inside.postMessage = told; // what the worker posts
      const page = this.inside.document;
      this.ready = new Promise((done, failed) => {
        const script = page.createElement("script");
        script.src = url;
        script.onload = done;
        script.onerror = failed;
        page.body.append(script);
      });
    }

    postMessage(data) {
      const heard = () => this.inside.dispatchEvent(new this.inside.MessageEvent("message", { data }));
      this.ready.then(heard);
    }

    terminate() {
      this.inside.frameElement.remove();
    }
  };
}
