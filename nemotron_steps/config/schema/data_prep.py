"""Configs of the `data_prep/*` steps: where rows come from and how they are split."""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import Field, PositiveFloat, PositiveInt

from nemotron_steps.config.schema.base import OPERATIONAL, Rule, Section

QuestionForm = Literal["plain", "instructed", "structured"]
"""Plain; with an instruction about the reply (graded by instruction_following); in JSON (structured_outputs)."""
MutationKind = Literal["operator", "comparison", "boolean", "constant", "condition", "arguments", "return"]
"""Faults that are put into packages."""
MUTATION_KINDS: tuple[MutationKind, ...] = get_args(MutationKind)


class ReasoningGymTask(Section):
    """One procedural data set of the reasoning-gym library."""

    dataset: str
    """The library's name for it, e.g. spell_backward."""
    weight: PositiveFloat = 1.0
    """Share of the rows, relative to the other tasks."""
    options: dict[str, Any] = Field(default_factory=dict)
    """The data set's own options (min_word_len, ...); an unknown one is refused."""
    form: QuestionForm = "plain"
    """How its questions are asked, which says what grades the replies."""


class ReasoningGymSource(Section):
    """`reasoning_gym.*`: questions made by reasoning-gym.

    Which split a question belongs to follows from its text alone, so the held-out questions of every step that uses
    the same fractions are the same ones, whatever its seed and sizes."""

    tasks: tuple[ReasoningGymTask, ...] = Field(min_length=1)
    seed: int = 42
    validation_fraction: float = Field(0.1, ge=0, lt=1)
    """Share of all possible questions kept for validation."""
    heldout_fraction: float = Field(0.1, ge=0, lt=1)
    """Share of all possible questions kept for the final figures."""

    def _broken_rules(self) -> Iterator[Rule]:
        if self.validation_fraction + self.heldout_fraction >= 1:
            what = "validation_fraction + heldout_fraction must be less than 1"
            yield Rule("validation_fraction", what, "validation_fraction=0.1 heldout_fraction=0.1")


class JsonlSource(Section):
    """`jsonl.*`: rows of the user's own JSON Lines file, or of every *.jsonl file of a folder in name order."""

    path: str


class SplitRows(Section):
    """`rows.*`: rows of each split."""

    train: PositiveInt | None = None
    """None: every row that is left (jsonl only)."""
    validation: int = Field(100, ge=0)
    heldout: int = Field(0, ge=0)


def broken_source_rules(
    name: str, made_up: bool, own: Mapping[str, bool], train: int | None, sample: int | None
) -> Iterator[Rule]:
    """What is wrong with a preparation's sources: made-up rows (`name`), or one of `own` (key → if given)."""
    given = [key for key, is_given in own.items() if is_given]
    chosen = [name, *given] if made_up else given
    if len(chosen) != 1:
        first = next(iter(own))
        others = " ".join(f"{key}=null" for key in chosen[1:])
        fix = others or (f"{first}.path=FILE" if first in ("jsonl", "packages") else f"{first}=PATH")
        yield Rule(given[0] if given else "jsonl", f"exactly one of {name} and {', '.join(own)} must be given", fix)
    if made_up and train is None:
        yield Rule("rows", f"rows.train must be given for {name}, whose rows never run out", "rows.train=1000")
    if made_up and sample is not None:
        what = f"sample limits the rows of the user's own; for {name} use rows.train"
        yield Rule("sample", what, f"sample=null rows.train={sample}")


class DataPrepConfig(Section):
    """What the preparations share: exactly one source, and the sizes of the splits.

    A source is a file or folder of JSON Lines (also .gz), Parquet files, or a folder that `datasets` saved; an
    address that fsspec opens (s3://, gs://, https://, ...); or a data set of the Hugging Face hub: ORG/NAME,
    hf://ORG/NAME, hf://ORG/NAME@REVISION, hf://ORG/NAME/FILE."""

    data_fingerprint: ClassVar[str] = "nemotron_steps.steps.data_prep.blends.blend_file:of_config"
    """What the cache key has of the files that the config names."""

    reasoning_gym: ReasoningGymSource | None = None
    jsonl: JsonlSource | None = None
    input_path: str | None = None
    """One source."""
    blend_path: str | None = None
    """A blend file: JSON, `{"datasets": [{"name", "path", "split", "subset", "weight"}, ...]}`. A weight of 1 takes
    every row once, one below 1 that share of them, one above 1 repeats rows in training. In place of `datasets`, lists
    `train`, `valid` and `test`: `rows` then cuts only the splits that have none."""
    mirror: str | None = None
    """A folder with copies of hub data sets, MIRROR/ORG/NAME: they are read there, and nothing is fetched."""
    rows: SplitRows = SplitRows()
    sample: PositiveInt | None = None
    """Rows read of each source at most (the user's own only). Where that leaves none to train on, the other splits have
    a tenth each at most."""
    max_refused_share: float = Field(0.0, ge=0, le=1)
    """Share of unusable rows that is left out, each one named and counted; above it the step fails."""
    num_workers: Annotated[PositiveInt | None, OPERATIONAL] = None
    """Processes that prepare the user's own rows. None: one for each processor."""

    def _broken_rules(self) -> Iterator[Rule]:
        own = {key: getattr(self, key) is not None for key in ("jsonl", "input_path", "blend_path")}
        made_up = self.reasoning_gym is not None
        yield from broken_source_rules("reasoning_gym", made_up, own, self.rows.train, self.sample)


class PlaceholderSources(Section):
    """`placeholders.*`: where the questions are that public blends only point to. Sources, as `input_path`."""

    dapo: str = "hf://BytedTsinghua-SIA/DAPO-Math-17k"
    """For rows whose `dataset` has "dapo" in its name."""
    skywork: str = "hf://Skywork/Skywork-OR1-RL-Data"
    """For rows whose `dataset` has "skywork" in its name: the split `math`."""


class PromptLengthConfig(Section):
    """`prompt_length.*`: prompts too long for a policy are left out."""

    tokenizer: str
    """A folder with the policy's tokenizer and chat template."""
    max_tokens: PositiveInt
    """Tokens of a prompt as the policy reads it, tools included."""


class LowEffortShare(Section):
    """`low_effort.*`: a share of the training prompts is converted to low effort: `string` is put at the end of their
    last user message, and grpo.low_effort rewards short answers to them.

    Which prompts follows from their text and the seed."""

    string: str = Field("{reasoning effort: low}", min_length=1)
    """`grpo.low_effort.string` of the training."""
    share: float = Field(0.02, gt=0, le=1)
    """Of all training prompts. Those that contain the string already count, and are left as they are."""
    environments: tuple[str, ...] = Field(("math_with_judge", "mcqa", "code_gen"), min_length=1)
    """Whose prompts are converted."""
    seed: int = 42


class RlPrepConfig(DataPrepConfig):
    """Config of `data_prep/rl_prep`."""

    agent: str | None = None
    """agent_ref of rows that have none. Default for reasoning_gym: reasoning_gym_simple_agent."""
    check_environments: bool = True
    """Refuse rows that their environment could not score."""
    placeholders: PlaceholderSources = PlaceholderSources()
    prompt_length: PromptLengthConfig | None = None
    low_effort: LowEffortShare | None = None
    layout: Literal["files", "tree"] = "files"
    """files: train-split.jsonl, val-split.jsonl, heldout.jsonl. tree: {train,val,test}/data.jsonl and manifest.json."""

    def _broken_rules(self) -> Iterator[Rule]:
        yield from super()._broken_rules()
        if self.reasoning_gym is not None and self.prompt_length is not None:
            what = "prompt_length leaves out prompts of the user's own: made-up ones are as long as their options say"
            yield Rule("prompt_length", what, "prompt_length=null")


class AnswerStyle(Section):
    """One way of writing an answer down."""

    template: str = Field(pattern=r"\{answer\}")
    """Text with {answer} in it."""
    weight: PositiveFloat = 1.0


class DemonstrationConfig(Section):
    """`demonstrations.*`: what the assistant of an SFT chat says."""

    styles: tuple[AnswerStyle, ...] = Field((AnswerStyle(template="<answer>{answer}</answer>"),), min_length=1)
    slip_rate: float = Field(0.0, ge=0, le=1)
    """Share of demonstrations with a wrong answer: letters swapped, dropped, doubled, replaced or shuffled."""
    follow_rate: float = Field(0.5, ge=0, le=1)
    """Share of replies to questions of another form than plain that are as asked; the others are in any style."""


class ComparisonConfig(Section):
    """`comparisons.*`: two answers to a question and the verdict that the task's own score implies."""

    styles: tuple[AnswerStyle, ...] = Field((AnswerStyle(template="<answer>{answer}</answer>"),), min_length=1)
    slip_rate: float = Field(0.5, ge=0, le=1)
    """Share of answers that are wrong."""
    foreign_rate: float = Field(0.05, ge=0, le=1)
    """Share of answers that answer another question."""
    attack_rate: float = Field(0.05, ge=0, le=1)
    """Share of answers that try to fool the judge, or say nothing."""
    max_attack_chars: PositiveInt = 1000
    """Longer attacks are left out: a model with a short context could not read them."""
    layout: Literal["plain", "roles"] = "plain"
    principle: str | None = None
    """What the judge is told to judge by, where a row of the user's own has no `principle`. None: nothing."""


class ReasoningControlConfig(Section):
    """`reasoning.*`: chats that teach a model to answer without thinking, and to answer when its thinking is cut.

    Which chats follows from their text and the seed."""

    strip_share: float = Field(0.0, ge=0, le=1)
    """Share of chats whose reasoning goes; `enable_thinking: false` is added to their chat_template_kwargs."""
    truncate_share: float = Field(0.0, ge=0, le=1)
    """Share of chats whose last reasoning is cut to one of the budgets, drawn evenly."""
    budgets: tuple[PositiveInt, ...] = Field((256, 512, 1024, 2048, 4096), min_length=1)
    """Tokens of the tokenizer, or words where there is none."""
    tokenizer: str | None = None
    """A folder with the tokenizer that counts budgets."""
    seed: int = 42

    def _broken_rules(self) -> Iterator[Rule]:
        if self.strip_share + self.truncate_share > 1:
            what = "strip_share + truncate_share must be at most 1"
            yield Rule("strip_share", what, "strip_share=0.1 truncate_share=0.03")


class TokenizerTrainingConfig(Section):
    """`tokenizer.*`: a tokenizer trained on the chats, for models that start from nothing."""

    min_share: float = Field(0.02, gt=0, le=1)
    """A phrase becomes a token when at least this share of the texts has it."""
    max_phrases: PositiveInt = 128
    texts: PositiveInt = 3000
    """Texts it is trained on: the first messages, and the questions of comparisons."""


class MadeUpPackages(Section):
    """`made_up.*`: packages that the step makes itself: modules of a few one-line functions, with their tests.

    Which split a package is in follows from its text alone, so held-out packages are the same whatever seed and sizes.
    """

    seed: int = 42
    functions: int = Field(1, ge=1, le=8)
    """Functions of a module."""
    mutations: tuple[MutationKind, ...] = Field(("operator", "comparison"), min_length=1)
    validation_fraction: float = Field(0.1, ge=0, le=0.4)
    heldout_fraction: float = Field(0.1, ge=0, le=0.4)


class SweDemonstrations(Section):
    """`swe.*`: chats in which an agent solves tasks of made-up packages with the tools of `swe_agent`."""

    made_up: MadeUpPackages = MadeUpPackages()
    share: float = Field(1.0, gt=0, le=1)
    """Of the chats; the others are reasoning_gym's."""
    slip_rate: float = Field(0.0, ge=0, le=1)
    """Share of demonstrations that change the line to another wrong one, or do not change it."""
    chats_per_task: PositiveInt = 1
    """Different demonstrations of one task."""


class SftPrepConfig(DataPrepConfig):
    """Config of `data_prep/sft_prep`."""

    kind: Literal["demonstrations", "comparisons"] = "demonstrations"
    """What chats are made of questions: answers to imitate, or comparisons for a generative reward model."""
    chats_per_question: PositiveInt = 1
    """Different chats made of one question, for tasks with few questions; rows.* count chats."""
    demonstrations: DemonstrationConfig = DemonstrationConfig()
    comparisons: ComparisonConfig = ComparisonConfig()
    reasoning: ReasoningControlConfig = ReasoningControlConfig()
    low_effort_instruction: str = "{reasoning effort: low}"
    """Added to the last user message of the user's own chats with `"reasoning_effort": "low"`."""
    tokenizer: TokenizerTrainingConfig | None = None
    """Written to tokenizer/ beside the chats. None: the model to be trained brings its own."""
    swe: SweDemonstrations | None = None
    """Demonstrations of an agent's harness, mixed with the others or by themselves."""

    def _broken_rules(self) -> Iterator[Rule]:
        made_up = self.reasoning_gym is not None or self.swe is not None or self.kind == "comparisons"
        if self.reasoning.strip_share + self.reasoning.truncate_share > 0 and made_up:
            what = "reasoning.* is of the user's own chats: made-up ones and comparisons are not changed"
            yield Rule("reasoning.strip_share", what, "reasoning.strip_share=0 reasoning.truncate_share=0")
        if self.swe is None:
            yield from super()._broken_rules()
            return
        own = (self.jsonl, self.input_path, self.blend_path, self.sample)
        if self.kind != "demonstrations" or any(value is not None for value in own):
            yield Rule("swe", "swe makes demonstrations, by itself or beside those of reasoning_gym", "swe=null")
        alone = self.reasoning_gym is None
        if alone != (self.swe.share == 1):
            what = "swe.share is 1 without reasoning_gym, which has the rest of the chats otherwise"
            yield Rule("swe.share", what, "swe.share=1" if alone else "swe.share=0.5")
        if self.rows.train is None:
            yield Rule("rows", "rows.train must be given for swe", "rows.train=1000")


class PreferencePrepConfig(DataPrepConfig):
    """Config of `data_prep/preference_prep`."""

    def _broken_rules(self) -> Iterator[Rule]:
        yield from super()._broken_rules()
        if self.reasoning_gym is not None:
            fix = "reasoning_gym=null input_path=PATH"
            yield Rule("reasoning_gym", "reasoning_gym makes no preference pairs", fix)


class DatasetConfig(Section):
    """`dataset.*`: rows as another trainer, or a table, has them."""

    path: str | None = None
    """JSON Lines, Parquet, CSV or a JSON list, a file or folder of them, or a folder that `datasets` saved."""


class ImportRowsConfig(Section):
    """Config of `data_prep/import_chats` and `data_prep/import_pairs`."""

    dataset: DatasetConfig = DatasetConfig()
    rows: SplitRows = SplitRows(validation=0)
    sample: PositiveInt | None = None
    """Rows read at most."""
    max_refused_share: float = Field(0.0, ge=0, le=1)
    """Share of unusable rows that is left out, each one named and counted; above it the step fails."""
    num_workers: Annotated[PositiveInt | None, OPERATIONAL] = None
    """Processes. None: one for each processor."""


class ImportPromptsConfig(ImportRowsConfig):
    """Config of `data_prep/import_prompts`."""

    prompt_column: str | None = None
    """None: told from the columns' names."""
    system: str | None = None
    """A system message before every prompt that has none."""
