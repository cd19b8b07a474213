"""workplace_assistant: tasks over five small databases with 26 tools. 1 if the databases end as they do after replaying
the row's ground truth, whatever the way there.

Tables are lists of rows of strings, read once from CSV files and copied for every rollout. Tools return text, mistakes
included. The data of public rows is not part of this package: it is NeMo-Gym's. Without it they are empty.
"""

import copy
import csv
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from nemotron_steps.environments.base import Environment, EnvironmentConfig, GradeResult, Row, RowError, Session
from nemotron_steps.environments.responses import Response, ToolCall
from nemotron_steps.errors import UnsupportedError

GROUND_TRUTH_FAILS = "ground_truth_fails"

Table = list[dict[str, str]]
Tool = Callable[..., Any]

FILES = {
    "email": "emails.csv",
    "calendar": "calendar_events.csv",
    "analytics": "analytics_data.csv",
    "project_management": "project_tasks.csv",
    "customer_relationship_manager": "customer_relationship_manager_data.csv",
}
COLUMNS = {
    "email": "email_id inbox/outbox sender/recipient subject sent_datetime body",
    "calendar": "event_id event_name participant_email event_start duration",
    "analytics": "date_of_visit visitor_id page_views session_duration_seconds traffic_source user_engaged",
    "project_management": "task_id task_name assigned_to_email list_name due_date board",
    "customer_relationship_manager": "customer_id assigned_to_email customer_name customer_email customer_phone "
    "last_contact_date product_interest status follow_up_by notes",
}
"""Of empty databases."""
KEYS = {
    "email": "email_id",
    "calendar": "event_id",
    "project_management": "task_id",
    "customer_relationship_manager": "customer_id",
}

_ON_ROWS = {
    "email": "get_email_information_by_id delete_email",
    "calendar": "get_event_information_by_id create_event update_event delete_event",
    "project_management": "get_task_information_by_id create_task update_task delete_task",
    "customer_relationship_manager": "add_customer update_customer delete_customer",
}
"""Tools on one row of a database, without its name before them."""

CHOICES = frozenset({"status", "list_name", "board"})

NOW = "2023-11-30 00:00:00"
PAGE_SIZE = 5


class _NotThereError(Exception):
    """A tool's answer: there is no such row."""


class Workplace:
    """One rollout's copy of the databases."""

    def __init__(self, tables: dict[str, Table]) -> None:
        self.tables = copy.deepcopy(tables)
        self.columns = {name: list(table[0]) if table else COLUMNS[name].split() for name, table in tables.items()}
        self.plots: list[str] = []
        self._tools: dict[str, Tool] = {
            "company_directory_find_email_address": self._find_address,
            "email_search_emails": self._search_emails,
            "email_send_email": self._send,
            "email_forward_email": self._forward,
            "email_reply_email": self._reply,
            "calendar_search_events": self._search_events,
            "analytics_get_visitor_information_by_id": self._visitor,
            "analytics_create_plot": self._plot,
            "analytics_total_visits_count": partial(self._per_day, lambda row: 1.0, False),
            "analytics_engaged_users_count": partial(
                self._per_day, lambda row: float(row["user_engaged"].lower() == "true"), False
            ),
            "analytics_traffic_source_count": lambda traffic_source="", **span: self._per_day(
                lambda row: float(not traffic_source or row["traffic_source"] == traffic_source), False, **span
            ),
            "analytics_get_average_session_duration": partial(
                self._per_day, lambda row: float(row["session_duration_seconds"]), True
            ),
            "project_management_search_tasks": lambda **values: self._match("project_management", values),
            "customer_relationship_manager_search_customers": self._search_customers,
        }
        made: dict[str, Tool] = {"get": self._get, "delete": self._delete, "update": self._update}
        made |= {"create": self._create, "add": self._create}
        for table, tools in _ON_ROWS.items():
            for tool in tools.split():
                self._tools[f"{table}_{tool}"] = partial(made[tool.partition("_")[0]], table)

    def call(self, name: str, arguments: dict[str, Any]) -> Any:
        if name not in self._tools:
            return f"Error: no tool is named {name}."
        given = {key: value for key, value in arguments.items() if value is not None}
        try:
            return self._tools[name](**given)
        except _NotThereError as error:
            return str(error)
        except (TypeError, ValueError, KeyError, AttributeError, OverflowError) as error:
            return f"Error: wrong arguments for {name}: {error}"

    def state(self) -> dict[str, Any]:
        """What two rollouts are compared by: every table in order of id, and the plots. Texts are without case, but for
        words of fixed lists."""

        def folded(row: dict[str, str]) -> tuple[tuple[str, str], ...]:
            return tuple((key, text if key in CHOICES else text.lower()) for key, text in sorted(row.items()))

        tables = {name: sorted(map(folded, table)) for name, table in self.tables.items()}
        return {**tables, "plots": sorted(self.plots)}

    def _named(self, table: str, identity: dict[str, str]) -> dict[str, str]:
        """The row whose id is the only other argument of a call."""
        if set(identity) != {KEYS[table]}:
            raise TypeError(f"expected {KEYS[table]}, found {', '.join(sorted(identity)) or 'nothing'}")
        (wanted,) = identity.values()
        for row in self.tables[table]:
            if row[KEYS[table]] == str(wanted):
                return row
        raise _NotThereError(f"Error: nothing has the id {wanted}.")

    def _get(self, table: str, /, field: str, **identity: str) -> Any:
        row = self._named(table, identity)
        return {field: row[field]} if field in row else f"Error: there is no field {field}."

    def _delete(self, table: str, /, **identity: str) -> str:
        self.tables[table].remove(self._named(table, identity))
        return "Deleted."

    def _update(self, table: str, /, field: str, new_value: Any, **identity: str) -> str:
        row = self._named(table, identity)
        if field not in row:
            return f"Error: there is no field {field}."
        row[field] = str(new_value)
        return "Updated."

    def _create(self, table: str, /, **values: Any) -> str:
        key = KEYS[table]
        columns = self.columns[table]
        unknown = sorted(set(values) - (set(columns) - {key}))
        if unknown:
            raise ValueError(f"unknown {', '.join(unknown)}")
        highest = max((int(row[key]) for row in self.tables[table]), default=0)
        identity = str(highest + 1).zfill(8)
        row = {column: str(values.get(column, "")) for column in columns}
        self.tables[table].append({**row, key: identity})
        return identity

    def _match(self, table: str, values: dict[str, Any]) -> Any:
        unknown = set(values) - set(self.columns[table])
        if unknown:
            raise ValueError(f"unknown {', '.join(sorted(unknown))}")
        return [
            row
            for row in self.tables[table]
            if all(str(value).lower() in row[key].lower() for key, value in values.items())
        ] or "Nothing found."

    def _visitor(self, visitor_id: str) -> Any:
        return [row for row in self.tables["analytics"] if row["visitor_id"] == str(visitor_id)] or "Nothing found."

    def _find_address(self, name: str = "") -> Any:
        known = {row["sender/recipient"] for row in self.tables["email"]}
        known |= {row["participant_email"] for row in self.tables["calendar"]}
        known |= {row["assigned_to_email"] for row in self.tables["project_management"]}
        return sorted(address for address in known if name.lower() in address.lower()) or "Nothing found."

    def _send(self, recipient: str, subject: str, body: str) -> str:
        if "@" not in recipient:
            return "Error: the recipient is no email address."
        sent = {"inbox/outbox": "outbox", "sender/recipient": recipient.lower(), "sent_datetime": NOW}
        return self._create("email", **sent, subject=subject, body=body)

    def _forward(self, email_id: str, recipient: str) -> str:
        row = self._named("email", {"email_id": email_id})
        return self._send(recipient, f"FW: {row['subject']}", row["body"])

    def _reply(self, email_id: str, body: str) -> str:
        row = self._named("email", {"email_id": email_id})
        return self._send(row["sender/recipient"], row["subject"], body)

    def _search_emails(
        self, query: str = "", date_min: str = "", date_max: str = "", page: int = 1, page_size: int = PAGE_SIZE
    ) -> Any:
        words = query.lower().split()
        found = [
            row
            for row in self.tables["email"]
            if all(word in f"{row['subject']} {row['body']} {row['sender/recipient']}".lower() for word in words)
            and (not date_min or row["sent_datetime"][:10] >= date_min[:10])
            and (not date_max or row["sent_datetime"][:10] <= date_max[:10])
        ]
        return _page(sorted(found, key=lambda row: row["sent_datetime"], reverse=True), page, page_size)

    def _search_events(
        self, query: str = "", time_min: str = "", time_max: str = "", page: int = 1, page_size: int = PAGE_SIZE
    ) -> Any:
        found = [
            row
            for row in self.tables["calendar"]
            if query.lower() in f"{row['event_name']} {row['participant_email']}".lower()
            and (not time_min or row["event_start"] >= time_min)
            and (not time_max or row["event_start"] <= time_max)
        ]
        return _page(sorted(found, key=lambda row: row["event_start"]), page, page_size)

    def _search_customers(self, page: int = 1, page_size: int = PAGE_SIZE, **values: Any) -> Any:
        spans = {key: values.pop(key) for key in list(values) if key.endswith(("_min", "_max"))}
        found = self._match("customer_relationship_manager", values)
        rows = found if isinstance(found, list) else []
        for key, bound in spans.items():
            column, least = key[:-4], key.endswith("_min")
            rows = [row for row in rows if (row[column] >= str(bound) if least else row[column] <= str(bound))]
        return _page(rows, page, page_size)

    def _per_day(
        self, value: Callable[[dict[str, str]], float], mean: bool, /, time_min: str = "", time_max: str = ""
    ) -> dict[str, float]:
        days: dict[str, list[float]] = {}
        for row in self.tables["analytics"]:
            day = row["date_of_visit"]
            if (not time_min or day >= time_min) and (not time_max or day <= time_max):
                days.setdefault(day, []).append(value(row))
        return {day: sum(values) / (len(values) if mean else 1) for day, values in days.items()}

    def _plot(self, time_min: str, time_max: str, value_to_plot: str, plot_type: str) -> str:
        path = f"plots/{time_min}_{time_max}_{value_to_plot}_{plot_type}.png"
        self.plots.append(path)
        return path


def _page(rows: Table, page: int, page_size: int) -> Any:
    begin = (int(page) - 1) * int(page_size)
    return rows[begin : begin + int(page_size)] or "Nothing found."


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
            loaded: dict[str, Table] = {name: [] for name in FILES}
            try:
                for name, file in FILES.items() if folder is not None else ():
                    with Path(str(folder), file).open(newline="", encoding="utf-8") as handle:
                        loaded[name] = list(csv.DictReader(handle, restval=""))
                    if not loaded[name]:
                        raise OSError(f"{folder}/{file} holds no rows")
            except OSError as error:
                key = "env.nemo_gym.environments.workplace_assistant.databases"
                raise UnsupportedError(
                    "the workplace databases are not there",
                    where=folder,
                    expected=f"a folder with {', '.join(FILES.values())}",
                    found=str(error),
                    hints=(f"{key}=FOLDER", f"{key}=null   # empty databases"),
                ) from error
            self._loaded = loaded
        return self._loaded


def _call(call: dict[str, Any]) -> ToolCall:
    arguments = call.get("arguments", "{}")
    return ToolCall(str(call["name"]), arguments if isinstance(arguments, str) else json.dumps(arguments))
