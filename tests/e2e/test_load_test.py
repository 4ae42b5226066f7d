"""`bench/serve.py` as people run it: it starts the server, measures it, compares it with Python, and draws."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.conftest import CheckpointMaker

SCRIPT = Path(__file__).parents[2] / "bench" / "serve.py"


def test_a_short_run_on_a_server_that_it_starts_itself(make_checkpoint: CheckpointMaker, tmp_path: Path) -> None:
    folder = make_checkpoint("llama", num_hidden_layers=2)
    save, chart = tmp_path / "results.jsonl", tmp_path / "chart.html"
    options = (
        "--token-ids 300 --concurrency 2 4 --requests 6 --prompt 8:24 --output 4:8 --n 2 --shared 0.5 --processes 2"
    )
    options += " --field return_token_ids=true"  # a model without text has nothing else to tell in an event
    files = ["--ceiling-seconds", "0.2", "--save", str(save), "--chart", str(chart)]
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--model", str(folder), *options.split(), *files],
        env={**os.environ, "PYTHONPATH": str(SCRIPT.parents[1])},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert json.loads(save.read_text()) == result
    assert "ceiling of the client" in done.stdout
    assert chart.read_text().count("<circle") == 4 * 2
    for point, concurrency in zip(result["points"], (2, 4), strict=True):
        assert (point["concurrency"], point["requests"], point["failed"]) == (concurrency, 6, 0)
        assert (point["counted_by"], point["errors"]) == ("usage", {})
        assert 6 * 2 * 4 <= point["output_tokens"] <= 6 * 2 * 8
        assert 6 * 8 <= point["prompt_tokens"] <= 6 * 24
        assert point["ttft_ms"]["p50"] <= point["ttft_ms"]["p99"] <= point["e2e_ms"]["p99"]
        assert point["python_tok_s"] > 0
        assert point["of_python"] > 0
    assert result["engine"] == "ramify serve"
    assert result["ceiling"]["tok_s"] > 0
