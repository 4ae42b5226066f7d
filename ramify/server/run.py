"""`serve`: one process that speaks HTTP, or several (`--http-workers`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ramify.remote.engine_process import started_early
from ramify.server.config import ServerConfig
from ramify.server.front import run_front
from ramify.server.listening import listener_of
from ramify.server.service import ServedModel, Service
from ramify.server.to_serve import ModelToServe


def serve(config: ServerConfig, models: Callable[[], Sequence[ModelToServe]]) -> None:
    """Listens at once and answers 503 until the models are loaded; returns when SIGTERM or Ctrl-C has ended it.

    After the signal no request is taken, running ones get the grace period, then they are ended with an error. A
    second signal ends them at once, a third the process. Whatever keeps the event loop busy, the process ends some
    seconds after that. What loading raises is raised here, and so is the loss of an engine: open requests have then
    ended with an error.
    """
    if config.http_workers > 1:
        from ramify.server.workers import serve_by_workers

        serve_by_workers(config, models)
        return

    def load(say: Callable[[str], None]) -> Sequence[ServedModel]:
        process = started_early(config.engine_process)
        try:
            from ramify.server.load import load_models  # brings torch, as that process does meanwhile

            return load_models(models(), config.engine_process, say, process)
        except BaseException:
            if process is not None:
                process.stop()
            raise

    run_front(Service(config), load, listener_of(config))
