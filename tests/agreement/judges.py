"""Judges that say what they are told: the same reply to both graders, in styles that judges have, by weight.

The weights: 97 of a hundred replies are as their prompt asks. NeMo-Gym's own example rollouts record 30 replies of its
judges (equivalence_llm_judge, inverse_if), and all of them are. `said` is the verdict that the judge means, `other` one
that it does not, `answer` what it was asked about.
"""

from __future__ import annotations

import importlib
import json
import random
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import MagicMock

import yaml

from nemotron_steps.environments.responses import Response as Answered
from nemotron_steps.environments.responses import response_object
from tests.agreement.answers import Items, pick, styled
from tests.agreement.compare import Rule
from tests.agreement.gym import Grader, Gym

REASONS = (
    "The candidate states the same fact in other words.",
    "It covers the second part, and the first one only in passing.",
    "The response gives the date asked for; nothing else is needed.",
    "I checked each requirement against the text, one after the other.",
    "1. Format: fine.\n2. Content: see above.\n3. Length: as asked.",
    "Compared to the reference, one item is named differently.",
    "**Analysis**\n- the claim is stated\n- the reason is given",
    "No part of the question asks for more.",
    "Yes and no would both be possible at first sight; the text decides it.",
    "The answer is not long, which is fine.",
)

Style = Callable[[random.Random, str, str], str]


def _why(rng: random.Random) -> str:
    return " ".join(rng.sample(REASONS, rng.randint(1, 3)))


def _of(*shapes: str) -> Style:
    """One of the shapes, with %S for what is said, %O for the other, %W for reasons, %B for both in some order."""

    def say(rng: random.Random, said: str, other: str) -> str:
        both = " or ".join(rng.sample((said, other), 2))
        text = re.sub("%W", lambda _: _why(rng), rng.choice(shapes))
        return text.replace("%S", said).replace("%O", other).replace("%B", both)

    return say


def _bare(shapes: Style) -> Style:
    return lambda rng, said, other: shapes(rng, said.strip("[]"), other.strip("[]"))


LABEL_STYLES: dict[str, tuple[float, Style]] = {
    "reasons, then the label": (40, _of("%W\n\n%S")),
    "label, then words": (21, _of("%W\n\n%S they are as judged", "%W\n\n%S is my verdict.")),
    "label alone": (13, _of("%S", "%S\n")),
    "label in markdown": (9, _of("%W\n\n**%S**", "%W\n\n`%S`", "### Verdict\n%S", "**Verdict:** %S", "Final: %S.")),
    "thoughts, then the label": (12, _of("<think>%W %B? %W</think>\n%S")),
    "label twice": (2, _of("%S\n%W\n%S")),
    "weighs both labels": (0.5, _of("Is it %B? %W\n\n%S")),
    "changes its mind": (0.3, _of("%O\n\nWait. %W So it is %S")),
    "quotes a label from the answer": (0.5, _of('It ends with "%O", which is no reason. %W\n\n%S')),
    "plain word": (0.5, _bare(_of("%W\n\n%S", "**%S**", "%W\n\nAnswer: %S", "So the verdict is %S."))),
    "lower case": (0.2, lambda rng, said, other: said.lower()),
    "label with one bracket": (0.2, lambda rng, said, other: said[1:-1]),
    "words without a verdict": (0.3, _of("I would rather not say.", "Both can be defended.", "%W")),
    "nothing": (0.2, _of("")),
    "thoughts cut off": (0.3, _of("<think>%W %O? Or rather %S. %W")),
}

RESULT_STYLES: dict[str, tuple[float, Style]] = {
    "JSON in a fence": (46, _of('```json\n{\n  "result": "%S",\n  "explanation": "As it shows."\n}\n```')),
    "JSON alone": (23, _of('{"result": "%S", "explanation": "It does what is asked."}')),
    "words, then JSON": (12, _of('%W\n\nOutput:\n```json\n{"result": "%S", "explanation": "See above."}\n```')),
    "thoughts, then JSON": (13, _of('<think>%W %B?</think>\n{"result": "%S", "explanation": "Fine."}')),
    "JSON, then words": (3, _of('{"result": "%S", "explanation": "Fine."}\n\n%W')),
    "broken JSON": (0.8, _of('{"result": "%S", "explanation": "It says "yes" twice."}', "{'result': '%S', 'why': ''}")),
    "repeats the format": (0.3, _of('As {"result": "PASS"/"FAIL", "explanation": "..."}:\n{"result": "%S"}')),
    "changes its mind": (0.2, _of('{"result": "%O"}\nWait.\n{"result": "%S"}')),
    "quotes a verdict from the answer": (0.4, _of('It ends with {"result": "%O"}, no reason.\n\n{"result": "%S"}')),
    "plain word": (0.4, _of("%W\n\n%S", "**%S**", "Result: %S", "Verdict: %S.", "The criterion: %SED")),
    "words without a verdict": (0.3, _of("I would rather not say.", '{"verdict": 1}')),
    "nothing": (0.2, _of("")),
    "thoughts cut off": (0.3, _of("<think>%W %O? Or rather %S. %W")),
}

SEVERAL = ("weighs both", "changes its mind", "quotes a", "repeats the format")

EMPTY = Rule(
    "`<think>` inside a message is split off, and an answer of nothing, or of reasoning alone, earns nothing: the judge"
    " is not asked",
    lambda answer: not answer.final.strip() or "<think>" in answer.text,
)
MASKED = Rule(
    "a judge that gives no verdict, or only thinks of one, is asked again, then the answer is masked: it is no verdict"
    " on the answer (there it is one; here too with `unclear_counts`)",
    lambda answer: answer.ours == "masked: judge_unparseable",
)
LEAST = Rule(
    "of several verdicts in one reply the first (as there) and the last have to pay: the first may be quoted, or named"
    " only to be weighed",
    lambda answer: any(style in answer.label for style in SEVERAL),
)


@dataclass
class Script:
    """What the judges say about one task.

    Attributes:
        replies: by grader ("ours", "theirs"): pairs of words that a question has and the reply to it; questions that
            have none of the words get the replies to no words in the order in which they are first asked.
    """

    replies: Mapping[str, Sequence[tuple[str, str]]]
    asked: dict[str, list[str]] = field(default_factory=lambda: {"ours": [], "theirs": []})

    def reply(self, grader: str, question: str) -> str:
        """What that grader's judge says to a question, the same whenever it is asked."""
        for words, reply in self.replies[grader]:
            if words and words in question:
                return reply
        asked = self.asked[grader]
        if question not in asked:
            asked.append(question)
        return [reply for words, reply in self.replies[grader] if not words][asked.index(question)]


SCRIPTS: dict[int, Script] = {}
"""By the number of a task, which is in every question about it."""


def task(number: int) -> str:
    """The words that name a task in its row."""
    return f"(task {number})"


def same(replies: Sequence[tuple[str, str]]) -> Script:
    """A script of both graders."""
    return Script({"ours": replies, "theirs": replies})


def say(
    styles: dict[str, tuple[float, Style]], rng: random.Random, good: str, bad: str, items: Items
) -> tuple[str, str]:
    """(style, reply) of a judge that means `good` of six answers in ten, and of one in ten that says nothing."""
    style = pick(rng, {name: weight for name, (weight, _) in styles.items()})
    likely = 0.6 if Answered.from_output(items).text.strip() else 0.1
    said, other = (good, bad) if rng.random() < likely else (bad, good)
    return style, styles[style][1](rng, said, other)


def told(rng: random.Random, *verdicts: str) -> Items:
    """An answer that a judge is asked about; a few write a verdict themselves."""
    core = rng.choice(CORES)
    if rng.random() < 0.02:
        core += f"\n{rng.choice((*verdicts, 'Verdict: PASS', 'YES'))}"
    return styled(core, rng.choice(CORES), rng)[1]


def odd(styles: Iterable[str]) -> str:
    """What is odd about the replies of these styles."""
    return ", ".join(sorted({style for style in styles if style in ODD})) or "as asked"


ODD = {style for styles in (LABEL_STYLES, RESULT_STYLES) for style, (weight, _) in styles.items() if weight < 1}

CORES = (
    "Charles Darwin proposed it.",
    "It is \\boxed{42}.",
    "**Paris** is the capital.\n\n- large\n- old",
    "I can't help with that.",
    "To stop a process use `kill PID`, and `kill -9 PID` if it hangs.",
    "Yes, you can. No extra step is needed.",
    "However, walking helps! It builds muscle! It calms us!",
    "Final: 3.5 km\nAnswer: 3.5",
    '{"name": "Ada", "age": 36}',
)


class Ours:
    """The judge of our graders."""

    async def complete(self, messages: Sequence[dict[str, str]], **sampling: float) -> str:
        return _scripted("ours", "\n".join(message["content"] for message in messages))


def _scripted(grader: str, question: str) -> str:
    found = re.search(r"\(task (\d+)\)", question)
    assert found is not None, question
    return SCRIPTS[int(found.group(1))].reply(grader, question)


def judged_grader(
    gym: Gym,
    server: str,
    prefix: str,
    config: str,
    reply: Callable[[Any], str] | None = None,
    parser: bool = True,
    **settings: Any,
) -> Grader:
    """The `verify` of a resources server with the settings of its published config, whose judge is scripted.

    Their model server's own converter makes items of the judge's text, with a reasoning parser or without.

    Args:
        prefix: of its classes' names. config: of the YAML file in its `configs`.
        reply: the judge's, to the parameters of a request; None: as SCRIPTS.
        settings: other than the config's.
    """
    sys.modules.pop("util", None)  # two servers have a module of that name
    app = gym.module(server)
    text = (gym.path / "resources_servers" / server / "configs" / f"{config}.yaml").read_text()
    (published,) = (
        inner
        for block in yaml.safe_load(text).values()
        for kind, named in block.items()
        if kind == "resources_servers"
        for inner in named.values()
    )
    made = getattr(app, f"{prefix}ResourcesServer", None) or getattr(app, f"{prefix}Server")
    known = made.model_fields["config"].annotation
    given = {key: value for key, value in {**published, **settings}.items() if key in known.model_fields}
    converter = importlib.import_module("nemo_gym.responses_converter").ResponsesConverter(
        return_token_id_information=False, uses_reasoning_parser=parser
    )

    async def post(server_name: str, url_path: str, json: Any) -> Any:
        asked = "\n".join(message.content for message in json.input)
        content = reply(json) if reply else _scripted("theirs", asked)
        items = converter.postprocess_assistant_message_dict({"role": "assistant", "content": content})
        return _Http(response_object(Answered("", output=[item.model_dump() for item in items])))

    sys.modules["nemo_gym.judge"].get_response_json = _Http.json  # type: ignore[attr-defined]  # orjson may be missing
    client = MagicMock(spec=importlib.import_module("nemo_gym.server_utils").ServerClient, post=post)
    grader = made(config=known(**{**given, "host": "", "port": 0, "entrypoint": "", "name": ""}), server_client=client)
    return Grader(grader, getattr(app, f"{prefix}VerifyRequest", None))


class _Http:
    """An answer of their model server."""

    status, ok = 200, True

    def __init__(self, body: Any) -> None:
        self._body = body

    async def json(self) -> Any:
        return self._body

    async def text(self) -> str:
        return json.dumps(self._body)

    read = text
