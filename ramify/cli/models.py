"""`ramify models`: the embedded default model and its cache."""

from __future__ import annotations

import typer

from ramify.cli.messages import say

app = typer.Typer(help="The embedded default model and its cache.", no_args_is_help=True)


@app.command("list")
def list_models() -> None:
    """What runs without naming a model, and where it is kept."""
    from ramify.models import embedded

    state = "cached" if embedded.is_cached() else "not fetched yet (ramify models pull)"
    print(f"{embedded.NAME}  SmolLM2-135M-Instruct, {embedded.LICENSE}, {embedded.FILE_SIZE // 10**6} MB, {state}")
    print(f"  {embedded.cached_path()}")


@app.command("pull")
def pull_model() -> None:
    """Fetch the embedded default model into the cache."""
    from ramify.models import embedded

    fresh = not embedded.is_cached()
    path = embedded.fetch(say)
    print(f"{'fetched' if fresh else 'already there'}: {path}")
