"""workplace_assistant: tasks over five small databases with 26 tools. 1 if the databases end as they do after replaying
the row's ground truth, whatever the way there."""

import json
from pathlib import Path
from typing import Any, ClassVar

from nemotron_steps.environments.base import Environment, EnvironmentConfig, GradeResult, Row, RowError, Session
from nemotron_steps.environments.responses import Response, ToolCall
from nemotron_steps.environments.tools.workplace_tables import FILES, Table, Workplace, load
from nemotron_steps.errors import UnsupportedError

GROUND_TRUTH_FAILS = "ground_truth_fails"


class WorkplaceConfig(EnvironmentConfig):
    """Settings."""

    databases: str | None = None
    """Folder with the five CSV files that the rows were written for; None: empty databases."""


class WorkplaceAssistant(Environment):
    """See the module docstring.

    A row has `ground_truth`, a list of calls, each with `name` and `arguments` (JSON text).
    """

    name: ClassVar[str] = "workplace_assistant"
    required_fields: ClassVar[tuple[str, ...]] = ("ground_truth",)
    config_class = WorkplaceConfig
    config: WorkplaceConfig

    def _setup(self) -> None:
        self._loaded: dict[str, Table] | None = None

    async def start(self) -> None:
        self._tables()

    def check_values(self, row: Row) -> None:
        truth = row["ground_truth"]
        if not isinstance(truth, list):
            raise RowError("ground_truth", "a list of calls", type(truth).__name__)
        for index, call in enumerate(truth):
            if not isinstance(call, dict) or not call.get("name") or _call(call).parsed_arguments() is None:
                raise RowError(f"ground_truth[{index}]", "a tool name and JSON arguments", repr(call)[:80])

    def check_resources(self, row: Row) -> None:
        """Every call of the ground truth must work on the databases: a row for others has nothing to be compared with,
        and doing nothing would be right."""
        self._wanted(row)

    async def seed(self, row: Row) -> Session:
        session = await super().seed(row)
        session.state = Workplace(self._tables())
        return session

    async def seed_recorded(self, row: Row) -> Session:
        """No databases: verify replays the response's own calls."""
        return await super().seed(row)

    async def call_tool(self, session: Session, name: str, arguments: dict[str, Any]) -> str:
        return json.dumps({"output": session.state.call(name, arguments)})

    async def verify(self, row: Row, response: Response, session: Session) -> GradeResult:
        """1 if both ends are the same, else 0. Without a session, the response's own calls are replayed. A ground truth
        that fails is a failure: who changes nothing would be right."""
        try:
            wanted = self._wanted(row)
        except RowError as error:
            return GradeResult.failed(GROUND_TRUTH_FAILS, message=str(error))
        reached = session.state
        if reached is None:
            reached = Workplace(self._tables())
            for call in response.tool_calls:
                arguments = call.parsed_arguments()
                if arguments is not None:
                    reached.call(call.name, arguments)
        got, want = reached.state(), wanted.state()
        wrong = [name for name in want if got[name] != want[name]]
        components = {"tool_calls": float(len(response.tool_calls))}
        return GradeResult(float(not wrong), components, details={"differs": wrong})

    def _wanted(self, row: Row) -> Workplace:
        """The databases after the ground truth."""
        workplace = Workplace(self._tables())
        for index, call in enumerate(row["ground_truth"]):
            arguments = _call(call).parsed_arguments()
            if arguments is None:
                raise RowError(f"ground_truth[{index}]", "JSON arguments", repr(call)[:80])
            output = workplace.call(str(call["name"]), arguments)
            if isinstance(output, str) and output.startswith("Error:"):
                found = self.config.databases or "empty"
                raise RowError(
                    f"ground_truth[{index}]",
                    "a call that works on the databases. Public rows need NeMo-Gym's, the folder "
                    "resources_servers/workplace_assistant/csv_data/processed: "
                    "env.nemo_gym.environments.workplace_assistant.databases=FOLDER",
                    f"{output} (databases: {found})",
                )
        return workplace

    def _tables(self) -> dict[str, Table]:
        folder = self.config.databases
        if self._loaded is None:
            try:
                self._loaded = {name: [] for name in FILES} if folder is None else load(Path(folder))
            except OSError as error:
                key = "env.nemo_gym.environments.workplace_assistant.databases"
                raise UnsupportedError(
                    "the workplace databases are not there",
                    where=folder,
                    expected=f"a folder with {', '.join(FILES.values())}",
                    found=str(error),
                    hints=(f"{key}=FOLDER", f"{key}=null   # empty databases"),
                ) from error
        return self._loaded


def _call(call: dict[str, Any]) -> ToolCall:
    arguments = call.get("arguments", "{}")
    return ToolCall(str(call["name"]), arguments if isinstance(arguments, str) else json.dumps(arguments))
