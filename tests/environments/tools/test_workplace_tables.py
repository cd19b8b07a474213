"""The tools of workplace_assistant one by one, on databases of a few rows."""

from typing import Any

import pytest

from nemotron_steps.environments.tools.workplace_assistant import Workplace

DAYS = ("2023-11-28", "2023-11-29", "2023-11-30")


def mail(number: int, subject: str, day: str) -> dict[str, str]:
    return {
        "email_id": str(number).zfill(8), "inbox/outbox": "inbox", "sender/recipient": "carlos@x.com",
        "subject": subject, "sent_datetime": f"{day} 10:00:00", "body": "Hello there",
    }  # fmt: skip


def visit(day: str, visitor: str, seconds: str, engaged: str, source: str) -> dict[str, str]:
    return {
        "date_of_visit": day, "visitor_id": visitor, "session_duration_seconds": seconds, "user_engaged": engaged,
        "traffic_source": source,
    }  # fmt: skip


def customer(number: int, name: str, last: str) -> dict[str, str]:
    return {"customer_id": str(number).zfill(8), "customer_name": name, "last_contact_date": last, "status": "Lead"}


def event(number: int, name: str, start: str) -> dict[str, str]:
    return {
        "event_id": str(number).zfill(8), "event_name": name, "participant_email": "ann@x.com", "event_start": start,
        "duration": "30",
    }  # fmt: skip


TABLES = {
    "email": [mail(3, "Task update", DAYS[0]), mail(9, "Lunch", DAYS[2]), mail(5, "Task list", DAYS[1])],
    "calendar": [event(2, "Sync", f"{DAYS[1]} 09:00:00"), event(1, "Review", f"{DAYS[0]} 09:00:00")],
    "analytics": [
        visit(DAYS[0], "1", "10", "True", "direct"),
        visit(DAYS[0], "2", "20", "False", "search"),
        visit(DAYS[1], "1", "6", "true", "search"),
    ],
    "project_management": [{"task_id": "00000004", "task_name": "Fix", "assigned_to_email": "bob@x.com"}],
    "customer_relationship_manager": [customer(n, f"Customer {n}", f"2023-11-{n:02}") for n in range(1, 8)],
}


@pytest.fixture
def workplace() -> Workplace:
    return Workplace(TABLES)


def ids(found: Any, key: str = "email_id") -> Any:
    return [int(row[key]) for row in found] if isinstance(found, list) else found


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        ({}, [9, 5, 3]),  # the newest first
        ({"query": "TASK hello"}, [5, 3]),
        ({"query": "carlos lunch"}, [9]),
        ({"date_min": DAYS[1]}, [9, 5]),
        ({"date_min": DAYS[1], "date_max": DAYS[1]}, [5]),
        ({"page": 2, "page_size": 2}, [3]),
        ({"page": "2", "page_size": "1"}, [5]),
    ],
)
def test_emails_are_searched_by_words_and_days_page_by_page(
    workplace: Workplace, arguments: dict[str, Any], found: Any
) -> None:
    assert ids(workplace.call("email_search_emails", arguments)) == found


@pytest.mark.parametrize(
    ("name", "arguments", "found"),
    [
        ("total_visits_count", {}, {DAYS[0]: 2.0, DAYS[1]: 1.0}),
        ("total_visits_count", {"time_min": DAYS[1]}, {DAYS[1]: 1.0}),
        ("engaged_users_count", {}, {DAYS[0]: 1.0, DAYS[1]: 1.0}),
        ("traffic_source_count", {"traffic_source": "direct"}, {DAYS[0]: 1.0, DAYS[1]: 0.0}),
        ("get_average_session_duration", {}, {DAYS[0]: 15.0, DAYS[1]: 6.0}),
        ("get_visitor_information_by_id", {"visitor_id": 1}, [TABLES["analytics"][0], TABLES["analytics"][2]]),
    ],
)
def test_visits_are_counted_by_day(workplace: Workplace, name: str, arguments: dict[str, Any], found: Any) -> None:
    assert workplace.call(f"analytics_{name}", arguments) == found


def test_what_is_sent_is_a_new_email_of_now(workplace: Workplace) -> None:
    assert workplace.call("email_send_email", {"recipient": "Sam@X.com", "subject": "S", "body": "B"}) == "00000010"
    assert workplace.tables["email"][-1] == {
        "email_id": "00000010", "inbox/outbox": "outbox", "sender/recipient": "sam@x.com", "subject": "S",
        "sent_datetime": "2023-11-30 00:00:00", "body": "B",
    }  # fmt: skip
    workplace.call("email_forward_email", {"email_id": "00000003", "recipient": "sam@x.com"})
    workplace.call("email_reply_email", {"email_id": "00000003", "body": "Yes"})
    forwarded, reply = workplace.tables["email"][-2:]
    assert (forwarded["subject"], forwarded["body"]) == ("FW: Task update", "Hello there")
    assert (reply["sender/recipient"], reply["subject"], reply["body"]) == ("carlos@x.com", "Task update", "Yes")
    for name, more in (("email_forward_email", {"recipient": "sam@x.com"}), ("email_reply_email", {"body": "x"})):
        assert workplace.call(name, {"email_id": "1", **more}) == "Error: nothing has the id 1."


def test_rows_are_made_changed_and_deleted_by_their_id(workplace: Workplace) -> None:
    made = workplace.call("project_management_create_task", {"task_name": "New", "assigned_to_email": None})
    assert made == "00000005"
    assert workplace.tables["project_management"][-1] == {
        "task_id": "00000005", "task_name": "New", "assigned_to_email": "",
    }  # fmt: skip
    assert workplace.call("project_management_create_task", {"task_id": "7"}).startswith("Error")
    change = {"task_id": made, "field": "task_name", "new_value": 3}
    assert workplace.call("project_management_update_task", change) == "Updated."
    asked = {"task_id": made, "field": "task_name"}
    assert workplace.call("project_management_get_task_information_by_id", asked) == {"task_name": "3"}
    assert workplace.call("project_management_delete_task", {"task_id": made}) == "Deleted."
    for name in ("get_task_information_by_id", "update_task", "delete_task"):
        given = {"task_id": made, "field": "task_name", "new_value": "x"}
        given = {key: given[key] for key in ("task_id", "field", "new_value")[: {"g": 2, "u": 3, "d": 1}[name[0]]]}
        assert workplace.call(f"project_management_{name}", given) == f"Error: nothing has the id {made}."
    assert workplace.call("project_management_search_tasks", {"task_name": "fix"}) == TABLES["project_management"]
    assert workplace.call("project_management_search_tasks", {"colour": "x"}).startswith("Error")
    assert workplace.call("company_directory_find_email_address", {}) == ["ann@x.com", "bob@x.com", "carlos@x.com"]
    assert workplace.call("company_directory_find_email_address", {"name": "BO"}) == ["bob@x.com"]


def test_a_state_knows_no_order_of_rows_and_no_case_but_every_plot(workplace: Workplace) -> None:
    other = Workplace({name: table[::-1] for name, table in TABLES.items()})
    for field in ("task_name", "task_name"):
        change = {"task_id": "00000004", "field": field}
        workplace.call("project_management_update_task", {**change, "new_value": "DONE"})
        other.call("project_management_update_task", {**change, "new_value": "done"})
    assert workplace.state() == other.state() != Workplace(TABLES).state()
    for value, same in (("DONE", False), ("done", True)):  # a word of a fixed list
        for place, text in ((workplace, "done"), (other, value)):
            change = {"customer_id": "00000003", "field": "status", "new_value": text}
            place.call("customer_relationship_manager_update_customer", change)
        assert (workplace.state() == other.state()) is same
    plot = {"time_min": DAYS[0], "time_max": DAYS[1], "value_to_plot": "visits", "plot_type": "bar"}
    path = workplace.call("analytics_create_plot", plot)
    assert path == f"plots/{DAYS[0]}_{DAYS[1]}_visits_bar.png" and workplace.state() != other.state()
    other.call("analytics_create_plot", plot)
    assert workplace.state() == other.state()
    assert TABLES["project_management"][0]["task_name"] == "Fix"  # a rollout has a copy of its own
