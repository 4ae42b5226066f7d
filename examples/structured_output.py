"""Facts from a text as JSON: every sample fits the schema, and the votes of many samples make one answer.

python examples/structured_output.py
"""

from __future__ import annotations

import json
from collections import Counter

from ramify import LLM, SamplingParams

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Paris", "Rome", "Oslo", "Cairo"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 30},
        "friends": {"type": "array", "items": {"type": "string", "maxLength": 12}, "maxItems": 3},
    },
    "required": ["city", "days", "friends"],
    "additionalProperties": False,
}
PROMPT = """Anna spent four days in Rome with Ben and Carla.
The same as JSON with city, days and friends:
"""


def main() -> None:
    llm = LLM(max_model_len=512)
    params = SamplingParams(n=8, temperature=0.8, max_tokens=120, seed=5, structured_outputs={"json": SCHEMA})
    [output] = llm.generate([PROMPT], params, use_tqdm=False)
    answers = [json.loads(sample.text) for sample in output.outputs if sample.finish_reason == "stop"]
    for answer in answers:
        print(answer)
    for name in ("city", "days"):
        value, votes = Counter(answer[name] for answer in answers).most_common(1)[0]
        print(f"{name}: {value} ({votes} of {len(answers)})")


if __name__ == "__main__":
    main()
