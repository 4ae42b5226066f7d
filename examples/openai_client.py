"""Many samples over HTTP: starts a server, then asks it with the official `openai` client.

Needs the extra `server` and the package `openai`. With --url it asks a server that runs already.

    python examples/openai_client.py --n 4
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

import openai

PROMPT = "The best thing about trees is"


@contextmanager
def running_server() -> Iterator[str]:
    """`ramify serve` on a free port; it prints its address when the model is loaded."""
    command = [sys.executable, "-c", "from ramify.cli import main; main()", "serve", "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        try:
            lines = iter(process.stderr)
            yield next(found[1] for line in lines if (found := re.search(r"Serving .* at (http://[\d.:]+)", line)))
        finally:
            process.terminate()


def main() -> None:
    parser = argparse.ArgumentParser(description="Ask a server for many samples with the openai client.")
    parser.add_argument("--url", help="a server that runs already, such as http://127.0.0.1:8000")
    parser.add_argument("--n", type=int, default=4)
    parser.add_argument("--max-tokens", type=int, default=16)
    options = parser.parse_args()
    if options.url:
        ask(options.url, options.n, options.max_tokens)
    else:
        with running_server() as url:
            ask(url, options.n, options.max_tokens)


def ask(url: str, n: int, max_tokens: int) -> None:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none")
    model = client.models.list().data[0].id

    print("Streamed, side by side:")
    texts: dict[int, str] = defaultdict(str)
    for chunk in client.completions.create(
        model=model, prompt=PROMPT, n=n, temperature=0.8, seed=7, max_tokens=max_tokens, stream=True
    ):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    for index, text in sorted(texts.items()):
        print(f"  {index}  {' '.join(text.split())}")

    print("The likeliest by beam search, with their scores:")
    beams = client.completions.create(
        model=model,
        prompt=PROMPT,
        n=2,
        max_tokens=max_tokens,
        extra_body={"strategy": "beam_search", "beam_width": max(n, 2)},
    )
    for choice in beams.choices:
        print(f"  {choice.model_dump()['score']:.3f}  {' '.join(choice.text.split())}")

    print("A chat, and how sure the model was:")
    answer = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": "What is the capital of France?"}],
        temperature=0,
        max_tokens=max_tokens,
        logprobs=True,
    ).choices[0]
    assert answer.logprobs is not None
    least = min(answer.logprobs.content or [], key=lambda token: token.logprob)
    print(f"  {' '.join((answer.message.content or '').split())}")
    print(f"  least sure of {least.token!r}: logprob {least.logprob:.2f}")

    print("What is wrong is refused by name:")
    try:
        client.completions.create(model=model, prompt=PROMPT, temperature=3)
    except openai.BadRequestError as error:
        print(f"  {error.param}: {error.body['message'] if isinstance(error.body, dict) else error}")


if __name__ == "__main__":
    main()
