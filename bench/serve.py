"""A load test of a server: latencies and rates under so many requests at a time, or so many arrivals a second.

    python bench/serve.py                # starts `ramify serve`, and compares it with LLM.generate on the same work
    python bench/serve.py --concurrency 1 4 16 --chart chart.html
    python bench/serve.py --url http://127.0.0.1:8000 --rate 2 4 8 --seconds 30 --prompt 100:500 --output 50:200
    python bench/serve.py --model ./my-model --concurrency 64 -- --max-num-seqs 64

With an address it measures any server of OpenAI's protocol, so that rivals are measured by the same client; without one
it starts `ramify serve` itself, with the flags that follow `--`. The client is written for speed, runs in --processes
processes, and first measures its own ceiling: what it makes of a server that answers at once.

First token: from sending (at a rate: from when it was due) until the first token came. Per token: the time from a
request's first token to its last, by the tokens after the first. Per event: the gaps between events of one choice as
they came. The last line is JSON; --save appends it to a file, --chart draws it. Ctrl-C reports what there is by then.
"""

from __future__ import annotations

import contextlib
import json
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import msgspec

from bench.engine_process import wait_until_quiet
from bench.load_chart import page, read_results
from bench.load_client import Job
from bench.load_connection import Target
from bench.load_options import Options, parse
from bench.load_processes import ClientError, Clients, probe, take_all_files
from bench.load_report import Point, load_name, point_of, remarks, table_head, table_row
from bench.load_server import Python, UnmeasurableError, ramify_serve, served_models, target_of
from bench.load_stub import stubs
from bench.load_work import Work
from bench.machine import commit, machine_name

GOAL = 0.97  # of LLM.generate's tokens per second, on a CPU
CEILING_REQUESTS_AT_A_TIME = 64  # where the load is a rate


def measure(options: Options, line: dict[str, Any]) -> None:
    """Fills the line of results, load by load, so that whatever ends the test leaves what there is."""
    with contextlib.ExitStack() as at_the_end:
        url = options.url
        if url is None:
            say("starting ramify serve")
            url = at_the_end.enter_context(ramify_serve(options.model, options.serve_flags))
        target = target_of(url, options.api_key)
        wait = 600.0 if options.url is None else options.wait
        model = choose_model(options, served_models(target, url, wait), url)
        line["engine"] = options.label or ("ramify serve" if options.url is None else f"{model or 'server'} at {url}")
        line["model"] = model
        work = msgspec.structs.replace(options.work, model=model)
        check(target, work, options)
        clients = at_the_end.enter_context(Clients(options.processes))
        if options.ceiling_seconds > 0:
            line["ceiling"] = measure_ceiling(clients, work, options)
        for number, load in enumerate(options.loads):
            Turns(clients, target, options).measure(work, f"{number}", load, line["points"])


def choose_model(options: Options, served: list[str], url: str) -> str | None:
    if options.url is None or options.model is None:  # a server that was started here names its one model itself
        return served[0] if served else None
    if served and options.model not in served:
        say(f"{url} does not list {options.model}; it has {', '.join(served)}")
    return options.model


def check(target: Target, work: Work, options: Options) -> None:
    """One request before all others: what is wrong with it is wrong with all."""
    short = msgspec.structs.replace(work, turn="check", output=(min(2, work.output[0]),) * 2)
    record = probe(target, short, options.timeout)
    if record.error is None:
        return
    hints = {
        "HTTP 401": "--api-key KEY, or $OPENAI_API_KEY",
        "HTTP 403": "--api-key KEY, or $OPENAI_API_KEY",
        "HTTP 404": "--model NAME names a model of the server; --chat or no --chat chooses the route",
    }
    hint = hints.get(record.error, "")
    if "ignore_eos" in record.detail:
        hint = "--no-ignore-eos leaves that field out; answers may then be shorter"
    raise UnmeasurableError(f"a first request failed: {record.error}: {record.detail}" + (f"\n{hint}" if hint else ""))


def measure_ceiling(clients: Clients, work: Work, options: Options) -> dict[str, Any]:
    """The same client on stub servers, one for each process. They share the cores with it: alone it could do more."""
    concurrency = max(int(load.get("concurrency", CEILING_REQUESTS_AT_A_TIME)) for load in options.loads)
    with stubs(options.processes) as targets:
        seconds = options.ceiling_seconds
        job = Job(target=targets[0], work=work, concurrency=concurrency, seconds=seconds, keeps_pace=True)
        loaded = clients.run(job, targets)
    point = point_of({"concurrency": concurrency}, loaded)
    if loaded.stopped:
        raise KeyboardInterrupt
    speeds = f"{point['tok_s'] or 0:,.0f} tok/s, {point['req_s']:,.0f} req/s"
    print(f"ceiling of the client, on a stub that answers at once: {speeds}", flush=True)
    return {name: point[name] for name in ("concurrency", "tok_s", "req_s")}


class Turns:
    """One load: warmed up, then measured so many times, in turns with LLM.generate where that is compared."""

    def __init__(self, clients: Clients, target: Target, options: Options) -> None:
        self._clients, self._target, self._options = clients, target, options

    def measure(self, work: Work, name: str, load: dict[str, float], points: list[Point]) -> None:
        options = self._options
        concurrency = int(load["concurrency"]) if "concurrency" in load else None
        python = None
        if options.compare and concurrency is not None:
            python = Python(options.model, concurrency, work.n)
        requests = options.requests or max(32, 2 * (concurrency or 0))
        self._warm_up(msgspec.structs.replace(work, turn=f"{name}.warm"), load, python)
        if not points:
            print(table_head(load), flush=True)
        at = len(points)
        for turn in range(options.repeats):
            if options.quiet:
                wait_until_quiet()
            work = msgspec.structs.replace(work, turn=f"{name}.{turn}")
            speed = None if python is None else python.tokens_per_second(work, requests)
            job = self._job(work, load)
            if options.seconds is None or options.requests is not None:
                job = msgspec.structs.replace(job, requests=requests)
            loaded = self._clients.run(job)
            point = point_of(load, loaded)
            if loaded.stopped and not loaded.records:
                raise KeyboardInterrupt
            self._keep(points, at, point, speed)
            notes = remarks(point) + ([] if speed is None else [f"LLM.generate on the same work: {speed:,.1f} tok/s"])
            print(table_row(point), *(f"  {note}" for note in notes), sep="\n", flush=True)
            if loaded.stopped:
                raise KeyboardInterrupt
        if "of_python" in points[at]:
            best, speed, ratio = (points[at][name] for name in ("tok_s", "python_tok_s", "of_python"))
            print(f"  best of each: over HTTP {best:,.1f} of {speed:,.1f} tok/s, {ratio:.2f} (goal {GOAL})", flush=True)

    @staticmethod
    def _keep(points: list[Point], at: int, point: Point, python: float | None) -> None:
        """The best run of each counts: what else a machine does only ever makes one slower."""
        before = points.pop() if len(points) > at else {}
        pythons = [speed for speed in (python, before.get("python_tok_s")) if speed is not None]
        is_better = before.get("tok_s") is None or (point["tok_s"] or 0) >= before["tok_s"]
        best = point if not before or (is_better and "stopped" not in point) else before
        if pythons and best["tok_s"] is not None:
            best["python_tok_s"] = round(max(pythons), 2)
            best["of_python"] = round(best["tok_s"] / max(pythons), 3)
        points.append(best)

    def _warm_up(self, work: Work, load: dict[str, float], python: Python | None) -> None:
        """The same work on other prompts: kernels are compiled and memory is touched before anything is measured."""
        count = int(load.get("concurrency", 4)) if self._options.warmup is None else self._options.warmup
        if not count:
            return
        say(f"{load_name(load)}: warming up with {count}")
        at_a_time = {"concurrency": load.get("concurrency", count)}
        loaded = self._clients.run(msgspec.structs.replace(self._job(work, at_a_time), requests=count, seconds=None))
        if loaded.stopped:
            raise KeyboardInterrupt
        if python is not None:
            python.tokens_per_second(work, count)

    def _job(self, work: Work, load: dict[str, float]) -> Job:
        return Job(
            target=self._target,
            work=work,
            concurrency=int(load["concurrency"]) if "concurrency" in load else None,
            rate=load.get("rate"),
            seconds=self._options.seconds,
            timeout=self._options.timeout,
        )


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    given = list(sys.argv[1:] if arguments is None else arguments)
    options = parse(given, __doc__)
    beside = []
    if options.beside:
        try:
            beside = read_results(options.beside)
        except (OSError, ValueError) as error:
            say(f"--beside: {error}")
            return 2
    take_all_files()
    line: dict[str, Any] = {
        "engine": options.label or "ramify serve",
        "workload": "load",
        "machine": machine_name(),
        "commit": commit(),
        "command": shown(given),
        "settings": options.settings(),
        "points": [],
    }
    status = 0
    try:
        measure(options, line)
    except KeyboardInterrupt:
        status = 130
        say("\nstopped: " + ("what was measured until now" if line["points"] else "nothing was measured yet"))
    except (UnmeasurableError, ClientError) as error:
        status = 2
        say(str(error))
    points = line["points"]
    if not points:
        return status or 1
    if not any(point["requests"] for point in points):
        status = status or 1
    ceiling = line.get("ceiling", {}).get("tok_s")
    fastest = max(point["tok_s"] or 0 for point in points)
    if ceiling and fastest > ceiling / 2:
        say(f"{fastest:,.0f} tok/s is more than half of the client's ceiling: more --processes would tell more")
    text = json.dumps(line)
    try:
        if options.save is not None:
            with options.save.open("a", encoding="utf-8") as file:
                file.write(text + "\n")
        if options.chart is not None:
            options.chart.write_text(page([*beside, line]), encoding="utf-8")
            say(f"{options.chart} is the chart")
    except OSError as error:  # the line below still has everything
        say(f"not written: {error}")
        status = status or 1
    print(text)
    return status


def shown(arguments: Sequence[str]) -> str:
    """The command as results keep it: they are shown around, so it has no key and no places of files."""
    kept: list[str] = []
    leaving_out = False
    for argument in arguments:
        name, equals, _ = argument.partition("=")
        if name in {"--save", "--chart", "--beside", "--api-key"}:
            leaving_out = not equals
        elif argument.startswith("--") or not leaving_out:
            leaving_out = False
            kept.append(argument)
    return " ".join(["python bench/serve.py", *kept])


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: no server is left behind
    sys.exit(main())
