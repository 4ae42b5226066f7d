"""The examples, run as a reader would run them, with small settings."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"

pytestmark = pytest.mark.usefixtures("default_gguf")


def run(name: str, *flags: str) -> list[str]:
    """The lines that an example prints."""
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name), *flags],
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
        env={**os.environ, "PYTHONWARNINGS": "error::UserWarning"},
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout.splitlines()


def continuations(lines: list[str]) -> list[str]:
    """Lines of the form `  0  text`."""
    return [match[1] for line in lines if (match := re.match(r"  \d+  (\S.*)", line))]


def test_every_example_is_run_here() -> None:
    here = Path(__file__).read_text(encoding="utf-8")
    missing = [path.name for path in EXAMPLES.glob("*.py") if f'run("{path.name}"' not in here]
    assert missing == []


def test_the_majority_is_what_most_answers_say() -> None:
    lines = run("majority_vote.py", "--n", "6", "--max-tokens", "32")
    votes = {match[1]: int(match[2]) for line in lines if (match := re.match(r" +(\S+) +(\d+)  #+$", line))}
    [silent] = [int(line.split()[-1]) for line in lines if line.strip().startswith("no answer")]
    assert sum(votes.values()) + silent == 6
    [verdict] = [line for line in lines if line.startswith("The majority says")]
    assert votes[verdict.split()[3].rstrip(".")] == max(votes.values())
    assert re.fullmatch(r"\d\d prompt tokens were computed for 6 answers\.", lines[-1]), "once, and not six times"


def test_the_reward_orders_winners_and_losers() -> None:
    lines = run("best_of_reward.py", "--n", "2", "--best-of", "5", "--max-tokens", "24", "--words", "15")
    border = lines.index("Not returned:")
    scored = [
        (number < border, float(match[1]))
        for number, line in enumerate(lines)
        if (match := re.match(r"  .  +(-?\d+\.\d\d) +\d+ words", line))
    ]
    assert [returned for returned, _ in scored] == [True, True, False, False, False]
    assert [score for _, score in scored] == sorted((score for _, score in scored), reverse=True)


def test_beams_resemble_each_other_more_than_diverse_samples_do() -> None:
    lines = run("beams_and_diversity.py", "--n", "4", "--max-tokens", "12")
    measured = {match[1]: float(match[2]) for line in lines if (match := re.match(r"(\S.*\S) +distinct-2 (\S+)", line))}
    assert list(measured) == ["greedy", "parallel", "best of 3n", "diverse", "beam search", "diverse beams"]
    assert measured["beam search"] < measured["diverse beams"]
    assert measured["beam search"] < measured["parallel"] <= measured["diverse"]
    assert len(continuations(lines)) == 1 + 5 * 4


def test_processors_do_what_they_say() -> None:
    lines = run("logits_processor.py", "--n", "2", "--max-tokens", "12")
    plain, without, favoured, both = (continuations(lines)[start : start + 2] for start in range(0, 8, 2))
    assert any("e" in text.lower() for text in plain)
    assert not any("e" in text.lower() for text in without + both)

    def share(texts: list[str]) -> float:
        words = " ".join(texts).lower().split()
        return sum(word.startswith("s") for word in words) / len(words)

    assert share(favoured) > share(plain)
    calls, rows = map(int, re.findall(r"\d+", lines[-1]))
    assert 0 < calls < rows


def test_the_openai_client_asks_a_server_of_its_own() -> None:
    lines = run("openai_client.py", "--n", "3", "--max-tokens", "8")
    assert len(continuations(lines)) == 3
    scores = [float(match[1]) for line in lines if (match := re.match(r"  (-\d\.\d{3})  \S", line))]
    assert len(scores) == 2
    assert scores == sorted(scores, reverse=True)
    assert any("Paris" in line for line in lines)
    assert lines[-1] == "  temperature: temperature must be less than or equal to 2, got 3"


def test_teacher_and_student_share_every_token(tmp_path: Path) -> None:
    page = tmp_path / "sample.html"
    lines = run("teacher_and_student.py", "--n", "2", "--max-tokens", "16", "--page", str(page))
    means = [float(line.split()[-1]) for line in lines if line.startswith("sample ")]
    assert len(means) == 2
    assert all(0 < mean < 1 for mean in means)
    assert lines[-1] == f"written: {page}"
    assert "<svg" in page.read_text(encoding="utf-8")


def test_a_verifier_finds_lists_that_pass() -> None:
    lines = run("step_beam_search.py", "--width", "2", "--branches", "3", "--steps", "2")
    [plain] = [int(line.split()[-2]) for line in lines if line.startswith("without the verifier")]
    points = [int(match[1]) for line in lines if (match := re.match(r"  \d +(-?\d+) points", line))]
    assert len(points) == 2
    assert points == sorted(points, reverse=True)
    assert points[0] >= plain


def test_particles_avoid_a_letter() -> None:
    lines = run("particle_filter.py", "--particles", "8", "--steps", "3", "--without", "o")
    [share] = [float(match[1]) for line in lines if (match := re.match(r"Of the particles' weight (\S+) does", line))]
    [plain] = [int(match[1]) for line in lines if (match := re.match(r"Of 8 plain samples (\d) ", line))]
    assert share > plain / 8
    weights = [float(line.split()[0]) for line in lines if re.match(r"  \d\.\d\d  A good", line)]
    assert weights == sorted(weights, reverse=True)


def test_power_samples_are_likelier() -> None:
    lines = run("power_sampling.py", "--chains", "3", "--moves", "6", "--pieces", "2", "--tokens", "3")
    means = [float(match[1]) for line in lines if (match := re.match(r"\S.*mean logprob (\S+),", line))]
    assert len(means) == 2
    assert means[1] > means[0]


def test_the_puzzle_is_solved() -> None:
    lines = run("puzzle_mcts.py", "--start", "2", "--target", "10", "--moves", "3")
    assert lines[0].startswith("solved after ")
    assert lines[0].endswith("= 10")
    shares = [float(share) for share in re.findall(r"\d\.\d\d", lines[1])]
    assert sum(shares) == pytest.approx(1, abs=0.02)


def test_genlm_programs_run_on_nodes() -> None:
    pytest.importorskip("genlm.backend", reason="genlm-backend is not installed")
    lines = run("genlm_adapter.py", "--particles", "2", "--tokens", "3")
    assert float(lines[0].split()[-1]) < 0
    weights = [float(line.split()[0]) for line in lines[1:3]]
    assert sum(weights) == pytest.approx(1, abs=0.02)
    [count] = [int(line.split()[0]) for line in lines if "positions were computed" in line]
    assert count < 20, "a prefix that is one token longer computes two positions, not all of them"


def test_samples_of_a_schema_vote() -> None:
    pytest.importorskip("llguidance")
    lines = run("structured_output.py")
    assert re.fullmatch(r"city: (Paris|Rome|Oslo|Cairo) \(\d of \d\)", lines[-2])
    assert re.fullmatch(r"days: \d+ \(\d of \d\)", lines[-1])
