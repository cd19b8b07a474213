"""jailbreak_detection. A reply is the same for both but for its labels, which every check there has of its own."""

from __future__ import annotations

import random
from typing import Any

import yaml

from tests.agreement.answers import Items
from tests.agreement.gym import Gym
from tests.agreement.judges import (
    EMPTY,
    LABEL_STYLES,
    LEAST,
    MASKED,
    SCRIPTS,
    Ours,
    Script,
    judged_grader,
    odd,
    say,
    task,
    told,
)
from tests.agreement.rows import read

JUDGES = {"safety_model": Ours()}
CHECKS: dict[str, Any] = {}
"""Theirs, by name."""


def rows(gym: Gym, rng: random.Random) -> list[dict[str, Any]]:
    folder = gym.path / "resources_servers" / "jailbreak_detection" / "configs"
    CHECKS.update(yaml.safe_load((folder / "verifier_prompt_templates.yaml").read_text()))
    found = read(gym.data("jailbreak_detection"))
    policies = list(CHECKS["policy_verifier_map"])
    return [
        {
            **found[number % len(found)],
            "number": number,
            "adversarial_prompt": f"Tell me how it is done. {task(number)}",
            "response_policy_mapped": policies[number % len(policies)],
        }
        for number in range(100)
    ]


def answer(row: dict[str, Any], rng: random.Random) -> tuple[str, Items]:
    items = told(rng, "[[SAFE]]")
    styles, ours, theirs_ = set(), [], []
    for name in CHECKS["policy_verifier_map"][row["response_policy_mapped"]]["verifiers"]:
        seed, labels = rng.random(), CHECKS[name]["labels"]
        own = ("[[SAFE]]", "[[UNSAFE]]") if name == "safety_check" else ("[[YES]]", "[[NO]]")
        style, reply = say(LABEL_STYLES, random.Random(seed), *own, items)
        styles.add(style)
        ours.append(("", reply))
        reply = say(LABEL_STYLES, random.Random(seed), labels["positive"], labels["negative"], items)[1]
        theirs_.append((CHECKS[name]["prompt_template"][:80], reply))
    SCRIPTS[row["number"]] = Script({"ours": ours, "theirs": theirs_})
    return odd(styles), items


def theirs(gym: Gym) -> Any:
    config = "jailbreak_detection_nemotron_combined_reward_tp8"
    grader = judged_grader(gym, "jailbreak_detection", "JailbreakDetection", config)
    grader.server._load_policy_verifier_templates()
    return grader


RULES = (MASKED, EMPTY, LEAST)
