"""Two models, one text: a teacher that knows the answer and a student that does not, token by token.

The default model plays both: the teacher's prompt holds the answer, the student's does not. Every token is drawn from
the optimal mixture of the two. Where they agree, the weight hardly matters; where they differ, it says whose opinion
counted more.

    python examples/teacher_and_student.py --n 2 --page sample.html
"""

from __future__ import annotations

import argparse
from itertools import accumulate
from pathlib import Path

from ramify import OptimalSampling

PROBLEM = "A robe takes 2 bolts of blue fiber and half that much white fiber. How many bolts in total does it take?"
ANSWER = "It takes 2/2 = 1 bolt of white fiber. So the total is 2 + 1 = 3 bolts."


def main() -> None:
    parser = argparse.ArgumentParser(description="Draw explanations from a teacher and a student at once.")
    parser.add_argument("--problem", default=PROBLEM)
    parser.add_argument("--answer", default=ANSWER, help="what the teacher is told, and the student is not")
    parser.add_argument("--n", type=int, default=2)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--seed", type=int, default=3)
    parser.add_argument("--page", type=Path, help="also write the first sample as a page, coloured by weight")
    options = parser.parse_args()

    sampler = OptimalSampling("smollm2-135m", "smollm2-135m", alpha_method="kl_symmetry")
    outputs = sampler.generate(
        f"Problem: {options.problem}\nAnswer: {options.answer}\nReasoning:",
        f"Problem: {options.problem}\nReasoning:",
        n=options.n,
        max_tokens=options.max_tokens,
        temperature=0.8,
        seed=options.seed,
        use_tqdm=False,
    )

    for number, text in enumerate(outputs.generated_texts):
        gains = [
            teacher - theta
            for teacher, theta in zip(
                outputs.diagnostics["logprob_teacher"][number],
                outputs.diagnostics["logprob_theta"][number],
                strict=True,
            )
        ]
        alphas = outputs.alpha_history[number]
        print(f"sample {number}: {len(alphas)} tokens, mean weight of the teacher {sum(alphas) / len(alphas):.3f}")
        print(f"  {text.strip()!r}")
        # How much likelier the text is to the teacher, thanks to the answer that it knows.
        print(f"  log-ratio teacher to student, summed: {list(accumulate(gains))[-1]:+.2f} nats")
    stats = outputs.alpha_stats
    print(f"weights from {stats['min']:.3f} to {stats['max']:.3f} over {stats['count']:.0f} tokens")
    if options.page:
        outputs.plot(options.page)
        print(f"written: {options.page}")


if __name__ == "__main__":
    main()
