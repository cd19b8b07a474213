"""The five small databases of workplace_assistant and the tools over them.

Tables are lists of rows of strings, read once from CSV files and copied for every rollout. Tools return text, mistakes
included. The data of public rows is not part of this package: it is NeMo-Gym's. Where none is configured, the tables
are those of a small made-up company, the same on every machine. Its ids begin at 90000001, so that a row written for
other databases is never taken for one of these.
"""

import copy
import csv
import random
from collections.abc import Callable
from datetime import date, timedelta
from functools import cache, partial
from pathlib import Path
from typing import Any

Table = list[dict[str, str]]

FIRST_ID = 90_000_001
PEOPLE = ("ada.ferro", "ben.okoro", "chen.liu", "dora.novak", "emil.haas", "fay.stone", "gita.rao", "hugo.lima")
DOMAIN = "rowan.example"
TODAY = date(2023, 11, 30)

_TASKS = ("Add search to the help pages", "Fix the login form", "Test the payment page", "Write the release notes")
_MEETINGS = ("Planning", "Design review", "Budget talk", "Retrospective", "Hiring round")
_PRODUCTS = ("Software", "Hardware", "Services", "Consulting", "Training")


@cache
def company() -> dict[str, Table]:
    """The five tables, by database. Copied before anything changes them."""
    draw = random.Random(20231130)

    def mail() -> str:
        return f"{draw.choice(PEOPLE)}@{DOMAIN}"

    def day(low: int, high: int) -> str:
        return str(TODAY + timedelta(days=draw.randint(low, high)))

    def identity(row: int) -> str:
        return str(FIRST_ID + row)

    return {
        "email": [
            {
                "email_id": identity(row),
                "inbox/outbox": draw.choice(("inbox", "inbox", "outbox")),
                "sender/recipient": mail(),
                "subject": f"{draw.choice(('Update on', 'Question about', 'Notes from'))} {draw.choice(_MEETINGS)}",
                "sent_datetime": f"{day(-60, 0)} {draw.randint(8, 17):02}:{draw.randint(0, 59):02}:00",
                "body": f"Hello,\n\n{draw.choice(_TASKS)}: {draw.choice(('done', 'in progress', 'blocked'))}.",
            }
            for row in range(120)
        ],
        "calendar": [
            {
                "event_id": identity(row),
                "event_name": draw.choice(_MEETINGS),
                "participant_email": mail(),
                "event_start": f"{day(-30, 30)} {draw.randint(9, 16):02}:{draw.choice(('00', '30'))}:00",
                "duration": draw.choice(("30", "60", "90")),
            }
            for row in range(80)
        ],
        "analytics": [
            {
                "date_of_visit": day(-60, 0),
                "visitor_id": f"{draw.randint(0, 9999):04}",
                "page_views": str(draw.randint(1, 20)),
                "session_duration_seconds": str(draw.randint(1, 60)),
                "traffic_source": draw.choice(("direct", "referral", "search engine", "social media")),
                "user_engaged": draw.choice(("True", "False")),
            }
            for _ in range(200)
        ],
        "project_management": [
            {
                "task_id": identity(row),
                "task_name": draw.choice(_TASKS),
                "assigned_to_email": mail(),
                "list_name": draw.choice(("Backlog", "In Progress", "In Review", "Completed")),
                "due_date": day(-20, 40),
                "board": draw.choice(("Back end", "Front end", "Design")),
            }
            for row in range(60)
        ],
        "customer_relationship_manager": [
            {
                "customer_id": identity(row),
                "assigned_to_email": mail(),
                "customer_name": f"{draw.choice(('Alex', 'Kim', 'Robin', 'Sascha'))} {draw.choice('BCDFGHKLMN')}arrow",
                "customer_email": f"contact{row}@client.example",
                "customer_phone": f"555-{draw.randint(1000, 9999)}",
                "last_contact_date": f"{day(-90, 0)} 12:00:00",
                "product_interest": draw.choice(_PRODUCTS),
                "status": draw.choice(("Lead", "Qualified", "Proposal", "Won", "Lost")),
                "follow_up_by": f"{day(0, 60)} 12:00:00",
                "notes": "",
            }
            for row in range(60)
        ],
    }


Tool = Callable[..., Any]

FILES = {
    "email": "emails.csv",
    "calendar": "calendar_events.csv",
    "analytics": "analytics_data.csv",
    "project_management": "project_tasks.csv",
    "customer_relationship_manager": "customer_relationship_manager_data.csv",
}

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


def load(folder: Path) -> dict[str, Table]:
    """The five tables."""
    tables = {}
    for name, file in FILES.items():
        with (folder / file).open(newline="", encoding="utf-8") as handle:
            tables[name] = list(csv.DictReader(handle, restval=""))
        if not tables[name]:
            raise OSError(f"{folder / file} holds no rows")
    return tables


class _NotThereError(Exception):
    """A tool's answer: there is no such row."""


class Workplace:
    """One rollout's copy of the databases."""

    def __init__(self, tables: dict[str, Table]) -> None:
        self.tables = copy.deepcopy(tables)
        self.columns = {name: list(table[0]) for name, table in tables.items()}
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
        """Result of a tool call, or a text that says what was wrong with it."""
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
