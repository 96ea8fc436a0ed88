"""The studio's server: starlette on 127.0.0.1, behind the guard; the page's files, JSON about runs, events, actions."""

from __future__ import annotations

import importlib.resources
import json
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedgraft.core.errors import FedgraftError, MissingExtra
from fedgraft.report.html import page_file
from fedgraft.report.sections import PICTURE_TYPES
from fedgraft.studio.actions import Actions, FederationActions
from fedgraft.studio.feed import Feed
from fedgraft.studio.guard import Guard, Secrets
from fedgraft.studio.library import RunLibrary, parameter
from fedgraft.studio.questions import Questions

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.routing import Route
    from starlette.types import ASGIApp

HOST = "127.0.0.1"
_TYPES = {".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml", ".html": "text/html"}
SHARED_FILES = ("charts.js", "base.css")
"""Files of the page that reports use too."""
_BODY = 100_000  # bytes of a request's body
REPORT_POLICY = "sandbox allow-scripts allow-downloads; default-src 'none'; script-src 'unsafe-inline'; img-src data:; "
REPORT_POLICY += "style-src 'unsafe-inline'"
"""Of a run's report: it has a policy of its own, and here no way to the studio."""


@dataclass(frozen=True)
class Studio:
    """What one studio shows, and whether it may act.

    `federation` and `node` return the state of a deployed federation or of one node, where there is one.
    """

    library: RunLibrary | None = None
    actions: Actions | None = None
    federation: Callable[[], dict[str, Any]] | None = None
    node: Callable[[], dict[str, Any]] | None = None
    questions: Questions | None = None
    own: Secrets = field(default_factory=Secrets)

    def boot(self) -> dict[str, Any]:
        """Return what the page has to know first: which views there are, and the token of actions."""
        from importlib.metadata import version

        folder = ""
        if self.library is not None:
            folder = str(self.library.root)
        return {
            "version": version("fedgraft"),
            "folder": folder,
            "runs": self.library is not None,
            "federation": self.federation is not None,
            "node": self.node is not None,
            "any_run": self.library is not None and bool(self.library.table()["runs"]),
            "questions": bool(self.questions),
            "actions": self.actions is not None,
            "form": self.actions is not None and self.actions.has_form,
            "action": self.own.action if self.actions is not None else "",
        }


def require_starlette() -> None:
    """Raise `MissingExtra` unless the studio's packages are installed."""
    try:
        import starlette  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise MissingExtra("uvicorn", "studio", "the studio") from error


def make_app(studio: Studio, port: int, feed: Feed | None) -> ASGIApp:
    """Return the application of a studio that listens on `port`, with the guard in front.

    `feed` tells pages what changed; None: there are no runs.
    """
    require_starlette()
    from starlette.applications import Starlette

    return Guard(Starlette(routes=_routes(studio, feed)), studio.own, port)


def _routes(studio: Studio, feed: Feed | None) -> list[Route]:
    """Return the addresses of a studio: the page's files, and those of what it shows."""
    from starlette.responses import JSONResponse, StreamingResponse
    from starlette.routing import Route

    async def page(request: Request) -> Response:
        """Send a file of the page."""
        return _file_of_page(request.path_params.get("name", "index.html"))

    async def boot(request: Request) -> Response:
        return JSONResponse(studio.boot())

    routes = [
        Route("/", page),
        Route("/page/{name}", page),
        Route("/api/boot", boot),
    ]
    if studio.library is not None and feed is not None:
        library = studio.library

        async def events(request: Request) -> Response:
            """Send events for as long as the page is open."""
            return StreamingResponse(feed.events(), media_type="text/event-stream")

        routes += [Route("/api/events", events), *_run_routes(library)]
    if studio.actions is not None and studio.library is not None:
        routes += _action_routes(studio.actions, studio.library)
    if studio.federation is not None:
        federation = studio.federation
        routes.append(_get("/api/federation", lambda query: federation()))
    if studio.node is not None:
        node = studio.node
        routes.append(_get("/api/node", lambda query: node()))
    if studio.questions is not None:
        questions = studio.questions
        routes.append(_get("/api/questions", lambda query: questions.read()))
        find = _picture_route("/api/question-picture", lambda query: questions.picture(parameter(query, "path")))
        routes.append(find)
    return routes


def _run_routes(library: RunLibrary) -> list[Route]:
    """Return the addresses about runs."""
    return [
        _get("/api/runs", lambda query: library.table()),
        _get("/api/groups", lambda query: library.groups(*_choice_of(query))),
        _get("/api/run", lambda query: library.view(parameter(query, "run"), query.get("tab"))),
        _get("/api/curves", lambda query: library.curves(query.getlist("run"), query.get("over", "round"))),
        _get("/api/compare", lambda query: library.comparison(query.getlist("run"), query.get("over", "round"))),
        _get(
            "/api/matrix",
            lambda query: library.matrix(parameter(query, "run"), _number(query, "round"), query.get("kind", "")),
        ),
        _get("/api/log", lambda query: library.log(parameter(query, "run"), _optional_number(query, "before"))),
        _picture_route("/api/picture", lambda query: library.picture(query.get("run", ""), query.get("path", ""))),
        _page_route("/api/report", "report.html", lambda query: library.report_page(parameter(query, "run"))),
        _page_route(
            "/api/comparison",
            "comparison.html",
            lambda query: library.comparison_page(query.getlist("run"), query.get("over", "round")),
        ),
    ]


def _get(path: str, answer: Callable[[Any], Any]) -> Route:
    """Return the route of an address whose answer is JSON; `answer` works in a thread and may raise for people."""
    from starlette.concurrency import run_in_threadpool
    from starlette.responses import Response
    from starlette.routing import Route

    def encode(query: Any) -> bytes:
        """Return the answer as bytes."""
        return json.dumps(answer(query), separators=(",", ":"), allow_nan=False).encode()

    async def endpoint(request: Request) -> Response:
        """Answer, or say in one sentence why not."""
        try:
            body = await run_in_threadpool(encode, request.query_params)
        except FedgraftError as error:
            return _error(error)
        return Response(body, media_type="application/json")

    return Route(path, endpoint)


def _picture_route(path: str, find: Callable[[Any], Path]) -> Route:
    """Return the route of pictures, which `find` looks up among the known ones."""
    from starlette.responses import FileResponse
    from starlette.routing import Route

    def endpoint(request: Request) -> Response:
        """Send the picture; a script in an SVG cannot run."""
        try:
            file = find(request.query_params)
        except FedgraftError as error:
            return _error(error)
        headers = {"content-security-policy": "sandbox; default-src 'none'; style-src 'unsafe-inline'"}
        return FileResponse(file, media_type=PICTURE_TYPES[file.suffix], headers=headers)

    return Route(path, endpoint)


def _page_route(path: str, name: str, make: Callable[[Any], str]) -> Route:
    """Return the route of a static page, made from the runs' files as they are now, as a file `name` to keep."""
    from starlette.responses import Response
    from starlette.routing import Route

    def endpoint(request: Request) -> Response:
        """Send the page."""
        try:
            text = make(request.query_params)
        except FedgraftError as error:
            return _error(error)
        headers = {"content-security-policy": REPORT_POLICY}
        headers["content-disposition"] = f"attachment; filename={name}"
        return Response(text, media_type="text/html", headers=headers)

    return Route(path, endpoint)


def _action_routes(actions: Actions, library: RunLibrary) -> list[Route]:
    """Return the addresses of a studio that may act."""
    from fedgraft.config import presets
    from fedgraft.config.describe import option_fields

    def form(query: Any) -> dict[str, Any]:
        """Return what the form of a new run is made of."""
        return {"presets": presets.summaries(), "fields": option_fields()}

    def changed(act: Callable[[Mapping[str, Any]], dict[str, Any]]) -> Callable[[Mapping[str, Any]], dict[str, Any]]:
        """Return the action, after which the folder is searched for its run."""

        def acting(body: Mapping[str, Any]) -> dict[str, Any]:
            """Act."""
            result = act(body)
            library.expect_change()
            return result

        return acting

    def folder(body: Mapping[str, Any]) -> Path:
        """Return the folder of the run that an action names."""
        return library.record(str(body.get("run", ""))).path

    routes = []
    if actions.has_form:
        routes.append(_get("/api/form", form))
    if isinstance(actions, FederationActions):
        routes.append(_post("/api/preflight", actions.preflight))
    return [
        *routes,
        _get("/api/jobs", lambda query: actions.jobs()),
        _post("/api/plan", actions.plan),
        _post("/api/start", changed(actions.start)),
        _post("/api/resume", changed(lambda body: actions.resume(folder(body)))),
        _post("/api/evaluate", changed(lambda body: actions.evaluate(folder(body)))),
        _post("/api/release", changed(lambda body: actions.release(folder(body)))),
        _post("/api/stop", changed(lambda body: actions.stop(str(body.get("run", ""))))),
    ]


def _post(path: str, act: Callable[[Mapping[str, Any]], dict[str, Any]]) -> Route:
    """Return the route of an action, which gets the JSON body of the request."""
    from starlette.concurrency import run_in_threadpool
    from starlette.responses import JSONResponse
    from starlette.routing import Route

    async def endpoint(request: Request) -> Response:
        """Act, or say in one sentence why not."""
        try:
            body = await _body_of(request)
            return JSONResponse(await run_in_threadpool(act, body))
        except FedgraftError as error:
            return _error(error)

    return Route(path, endpoint, methods=["POST"])


async def _body_of(request: Request) -> Mapping[str, Any]:
    """Return the JSON table in the body of a request; refuse a large one and everything else."""
    data = b""
    async for chunk in request.stream():
        data += chunk
        if len(data) > _BODY:
            raise FedgraftError("E-STUDIO-BODY", "the request is too large", "shorten it")
    try:
        body = json.loads(data)
    except (ValueError, RecursionError):
        body = None
    if not isinstance(body, dict):
        raise FedgraftError("E-STUDIO-BODY", "the request is no JSON table", "reload the page")
    return body


def _error(error: FedgraftError) -> Response:
    """Return an error for people as JSON."""
    from starlette.responses import JSONResponse

    return JSONResponse({"code": error.code, "message": str(error)}, status_code=400)


def _file_of_page(name: str) -> Response:
    """Return a file of the page; only names that the package has are looked up."""
    from starlette.responses import PlainTextResponse, Response

    if name in SHARED_FILES:
        text = page_file(name)
    else:
        folder = importlib.resources.files("fedgraft.studio").joinpath("page")
        if name not in {file.name for file in folder.iterdir()}:
            return PlainTextResponse("There is no such file.\n", status_code=404)
        text = folder.joinpath(name).read_text("utf-8")
    return Response(text, media_type=_TYPES[Path(name).suffix])


def _number(query: Any, key: str) -> int:
    """Return a whole number of a request; raise if it is none."""
    text = parameter(query, key)
    if not text.isdigit():
        raise FedgraftError("E-STUDIO-PARAMETER", f"{key} is {text[:40]!r}, no whole number", "reload the page")
    return int(text)


def _choice_of(query: Any) -> tuple[int | None, tuple[int, ...] | None]:
    """Return the version of the table and its rows that a request names; None twice without any."""
    text = query.get("among")
    if not text:
        return None, None
    rows = []
    for word in text.split():
        if word.isdigit():
            rows.append(int(word))
    return _number(query, "version"), tuple(rows)


def _optional_number(query: Any, key: str) -> int | None:
    """Return a whole number of a request; None if it has none."""
    if not query.get(key):
        return None
    return _number(query, key)


class Server:
    """A studio that listens on this machine; `address` has its token."""

    def __init__(self, studio: Studio, port: int | None = None) -> None:
        require_starlette()
        import uvicorn

        self.studio = studio
        self._socket = _listen(port)
        self.port = int(self._socket.getsockname()[1])
        feed = None
        if studio.library is not None:
            library = studio.library
            feed = Feed(library.look, lambda: library.busy)

        class EndingServer(uvicorn.Server):
            """Ends the events of open pages before it waits for the last responses."""

            async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
                """End."""
                if feed is not None:
                    feed.close()
                await super().shutdown(sockets)

        config = uvicorn.Config(
            make_app(studio, self.port, feed),
            lifespan="off",
            log_level="warning",
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=1,
            ws="none",
        )
        self._server = EndingServer(config)

    @property
    def address(self) -> str:
        """Return the address to open; whoever has it may look."""
        return f"http://{HOST}:{self.port}/?token={self.studio.own.token}"

    def run(self) -> None:
        """Serve until Ctrl-C, or until `stop`."""
        self._server.run(sockets=[self._socket])

    def stop(self) -> None:
        """End `run` in another thread."""
        self._server.should_exit = True

    @property
    def started(self) -> bool:
        """Return whether the server answers."""
        return bool(self._server.started)


def open_privately(address: str) -> None:
    """Open the address in the browser through a file that only this user can read.

    On a command line every user of the machine could read the token.
    """
    import html
    import os
    import tempfile
    import webbrowser

    descriptor, path = tempfile.mkstemp(prefix="fedgraft-studio-", suffix=".html")
    with os.fdopen(descriptor, "w") as file:
        file.write(f'<meta http-equiv="refresh" content="0;url={html.escape(address)}">\n')
    webbrowser.open(Path(path).as_uri())


def _listen(port: int | None) -> socket.socket:
    """Return a socket that listens on the loopback address; on `port`, or on one that the system chooses."""
    listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((HOST, port or 0))
        listening.listen(128)  # a browser that comes before the server is ready waits, and is not refused
    except OSError as error:
        listening.close()
        raise FedgraftError(
            "E-STUDIO-PORT",
            f"the studio cannot listen on {HOST}:{port} ({error.strerror or error})",
            "choose another --port, or leave it out",
            port=port,
        ) from None
    return listening
