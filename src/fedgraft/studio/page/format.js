// Numbers as people read them.
export const percent = share => (share === null || share === undefined ? "–" : `${(100 * share).toFixed(2)} %`);

export function bytes(count) {
  if (!count) return "–";
  for (const unit of ["B", "kB", "MB", "GB"]) {
    if (count < 999.95 || unit === "GB") return `${unit === "B" ? count.toFixed(0) : count.toFixed(1)} ${unit}`;
    count /= 1000;
  }
  return "–";
}

export function clock(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 59.95) return `${seconds.toFixed(1)} s`;
  const minutes = Math.floor(Math.round(seconds) / 60), rest = Math.round(seconds) % 60;
  if (minutes < 60) return `${minutes} min ${String(rest).padStart(2, "0")} s`;
  return `${Math.floor(minutes / 60)} h ${String(minutes % 60).padStart(2, "0")} min`;
}

export const text = value => (value === null || value === undefined ? "–" : typeof value === "string" ? value : JSON.stringify(value));
// A time by this machine's clock, as every log writes it: 2026-11-19 21:05.
export function when(seconds) {
  if (!seconds) return "–";
  const time = new Date(1000 * seconds), two = number => String(number).padStart(2, "0");
  return `${time.getFullYear()}-${two(time.getMonth() + 1)}-${two(time.getDate())} ${two(time.getHours())}:${two(time.getMinutes())}`;
}
