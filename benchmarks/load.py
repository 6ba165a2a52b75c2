"""Throughput and latency under load: this server, one request at a time and batched, and `transformers serve`.

Each server runs in its own process, one after another, with the same model, threads and clients, which request whole
greedy outputs over HTTP. No prompt is sent twice to one server, so that no output is cached. `plain` is this server
without drafts: the gain of batching alone. Rows are kept in OUTPUT/rows.jsonl; an interrupted run resumes.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import pandas as pd
import torch
import transformers
import typer

from token_recycling.bench.report import Table

ROOT = Path(__file__).parent.parent
ASKED = ["serve", "{model}", "--port", "{port}", "--dtype", "{dtype}", "--device", "cpu"]
ALONE = ["-c", "from token_recycling.cli.app import app; app()", *ASKED, "--name", "{model}"]
TOGETHER = [*ALONE, "--concurrency", "16"]
SERVERS = {
    "one at a time": ALONE,
    "batched": TOGETHER,
    "batched, per-request": [*TOGETHER, "--isolation", "per-request"],
    "batched, plain": [*TOGETHER, "--drafter", "plain"],
    "transformers serve": ["-m", "transformers.cli.transformers", *ASKED, "--continuous-batching"],
}
"""Arguments of Python."""
REFERENCE, RIVAL = "one at a time", "transformers serve"
"""The server whose outputs others must equal, and the one whose throughput and latency are the unit."""
LEAST = 4
"""Minimum requests per measurement."""
Row = dict[str, Any]


def main(
    output: Annotated[Path, typer.Option(help="folder of the rows; resumed")] = ROOT / "build/bench/load",
    model: Annotated[Path, typer.Option(help="a local model folder")] = ROOT / "models" / "target",
    prompts: Annotated[Path, typer.Option(help="a folder of prompts, one a file")] = ROOT / "models" / "prompts",
    clients: Annotated[list[int], typer.Option(help="concurrent clients; may be repeated")] = [1, 4, 16],  # noqa: B006
    dtype: Annotated[list[str], typer.Option(help="may be repeated")] = ["float32", "bfloat16"],  # noqa: B006
    tokens: Annotated[int, typer.Option(help="maximum tokens of an output")] = 128,
    threads: Annotated[int, typer.Option(help="threads of each server")] = os.cpu_count() or 1,
    rounds: Annotated[int, typer.Option(help="repetitions; the one with the highest throughput counts")] = 2,
    minutes: Annotated[float, typer.Option(help="stop after this time; the next run resumes")] = 9.5,
    fresh: Annotated[bool, typer.Option("--fresh", help="deletes the rows first")] = False,
) -> None:
    """Measure what is missing, and write the page."""
    output.mkdir(parents=True, exist_ok=True)
    file, end = output / "rows.jsonl", time.monotonic() + 60 * minutes
    if fresh:
        file.unlink(missing_ok=True)
    texts = [path.read_text(encoding="utf-8") for path in sorted(prompts.iterdir())]
    rows = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    asked = prompts_of(clients, len(texts))
    for number in range(rounds):
        for kind in dtype:
            for name, arguments in SERVERS.items():
                here = {"round": number, "dtype": kind, "server": name}
                known = [row["clients"] for row in rows if row.items() >= here.items()]
                missing = [count for count in clients if count not in known]
                if not missing or time.monotonic() > end:
                    continue
                with running(arguments, str(model), kind, threads) as port:
                    ask(port, str(model), "def main():\n", 8)
                    for count in missing:
                        if time.monotonic() > end:
                            break
                        own = {place: texts[place] for place in asked[count]}
                        rows.append({**here, "clients": count, **measured(port, str(model), own, count, tokens)})
                        with file.open("a") as kept:
                            kept.write(json.dumps(rows[-1]) + "\n")
                        typer.echo(
                            f"{kind}, {name}, {count} clients: throughput {throughput(rows[-1]):.0f} tokens/s", err=True
                        )
    page = output.with_suffix(".md")
    page.write_text(markdown(rows, tokens, threads), encoding="utf-8")
    typer.echo(page.read_text())
    if time.monotonic() > end:
        typer.echo("stopped by --minutes; the same command resumes", err=True)


@contextmanager
def running(arguments: list[str], model: str, dtype: str, threads: int) -> Iterator[int]:
    """The port of a server, for the length of the block."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [word.format(model=model, port=port, dtype=dtype) for word in arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    with tempfile.TemporaryFile("w+") as log:
        server = subprocess.Popen([sys.executable, *command], env=environment, stdout=log, stderr=log)
        try:
            while not answers(port):
                if server.poll() is not None:
                    log.seek(0)
                    raise RuntimeError(f"the server {' '.join(command)} ended: {log.read()[-2000:]}")
                time.sleep(0.2)
            yield port
        finally:
            server.terminate()
            try:
                server.wait(20)
            except subprocess.TimeoutExpired:
                server.kill()


def answers(port: int) -> bool:
    """Whether there is a server."""
    try:
        urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).close()
    except OSError:
        return False
    return True


def ask(port: int, model: str, prompt: str, tokens: int) -> tuple[str, int, float]:
    """Return the output of a request, its number of tokens, and the latency in seconds."""
    body = {"model": model, "prompt": prompt, "max_tokens": tokens, "temperature": 0}
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/completions", json.dumps(body).encode(), headers)
    began = time.perf_counter()
    with urllib.request.urlopen(request, timeout=600) as answer:
        said = json.loads(answer.read())
    return said["choices"][0]["text"], said["usage"]["completion_tokens"], time.perf_counter() - began


def prompts_of(clients: list[int], prompts: int) -> dict[int, list[int]]:
    """Return the prompts of each number of clients, no prompt twice."""
    found, first = {}, 0
    for count in clients:
        found[count] = list(range(first, first := first + max(LEAST, count)))
    if first > prompts:
        raise typer.BadParameter(f"clients {clients} need {first} prompts, got {prompts}")
    return found


def measured(port: int, model: str, prompts: dict[int, str], clients: int, tokens: int) -> Row:
    """Send the prompts from that many concurrent clients; return the row."""
    began = time.perf_counter()
    with ThreadPoolExecutor(clients) as pool:
        found = list(pool.map(lambda prompt: ask(port, model, prompt, tokens), prompts.values()))
    seconds = time.perf_counter() - began
    digests = [hashlib.sha1(text.encode()).hexdigest()[:12] for text, *_ in found]
    return {
        "tokens": sum(said for _, said, _ in found),
        "seconds": round(seconds, 3),
        "latency": round(statistics.median(taken for *_, taken in found), 3),
        "texts": dict(zip(map(str, prompts), digests, strict=True)),
    }


def markdown(rows: list[Row], tokens: int, threads: int) -> str:
    """The page."""
    parts = [
        "# Throughput by number of clients",
        f"`make bench-load` on a CPU, {threads} threads, torch {torch.__version__}, transformers "
        f"{transformers.__version__}: the shipped model, {tokens} greedy tokens after each of the shipped prompts, "
        "over HTTP. *batched* is `token-recycling serve --concurrency 16`, *per-request* the same without learning "
        "from other requests, *plain* without drafts. Cells: throughput (output tokens of all clients per second, the "
        "best round) and, in parentheses, the median latency of a request, both relative to "
        f"*{RIVAL}* (`--continuous-batching`) with as many clients.",
    ]
    for dtype in dict.fromkeys(row["dtype"] for row in rows):
        chosen = [row for row in rows if row["dtype"] == dtype]
        wanted: dict[str, str] = {}
        for row in chosen:
            if row["server"] == REFERENCE:
                wanted |= row["texts"]
        lines = []
        for name in SERVERS:
            own = [
                item for row in chosen if row["server"] == name for item in row["texts"].items() if item[0] in wanted
            ]
            same = sum(digest == wanted[place] for place, digest in own)
            cells = {
                f"{count} client{'s' * (count > 1)}": cell(best(chosen, name, count), best(chosen, RIVAL, count))
                for count in sorted({row["clients"] for row in chosen})
            }
            lines.append({"server": name, **cells, "identical": f"{same} of {len(own)}"})
        note = f"Identical: outputs equal to those of *{REFERENCE}*."
        parts += [f"## {dtype}", Table(dtype, pd.DataFrame(lines), note).markdown()]
    return "\n\n".join(parts) + "\n"


def best(rows: list[Row], server: str, clients: int) -> Row | None:
    """The best round of a server with so many clients."""
    found = [row for row in rows if row["server"] == server and row["clients"] == clients]
    return max(found, key=throughput, default=None)


def throughput(row: Row) -> float:
    """Return output tokens of all clients per second."""
    return row["tokens"] / row["seconds"]


def cell(row: Row | None, other: Row | None) -> str:
    """Return the throughput, and the median latency in parentheses, relative to another server's."""
    if row is None or other is None:
        return ""
    return f"{throughput(row) / throughput(other):.2f} ({row['latency'] / other['latency']:.2f})"


if __name__ == "__main__":
    typer.run(main)
