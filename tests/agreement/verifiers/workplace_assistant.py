"""workplace_assistant, on NeMo-Gym's databases: recorded calls, replayed by both."""

from __future__ import annotations

import csv
import json
import random
from pathlib import Path
from typing import Any

from nemotron_steps.environments.responses import function_call_output_item, message_item
from tests.agreement.answers import Items, call_item, mutated_value, pick
from tests.agreement.compare import Rule
from tests.agreement.gym import Gym
from tests.agreement.rows import asking, read

NAME = "workplace_assistant"
DATABASES = "resources_servers/workplace_assistant/csv_data/processed"


def settings(gym: Gym) -> dict[str, Any]:
    return {"databases": str(gym.path / DATABASES)}


def rows(gym: Gym, rng: random.Random) -> list[dict[str, Any]]:
    return [*read(gym.data(NAME)), *(_made(gym.path / DATABASES, rng) for _ in range(60))]


def _made(folder: Path, rng: random.Random) -> dict[str, Any]:
    """A row with one to three calls on what is in the databases."""

    def one(name: str) -> dict[str, str]:
        return rng.choice(list(csv.DictReader((folder / f"{name}.csv").open())))

    def some() -> tuple[str, dict[str, Any]]:
        email, event, task = one("emails"), one("calendar_events"), one("project_tasks")
        customer = one("customer_relationship_manager_data")
        return rng.choice(
            (
                ("email_reply_email", {"email_id": email["email_id"], "body": "Thanks, I will look into it."}),
                ("email_forward_email", {"email_id": email["email_id"], "recipient": "raj.patel@atlas.com"}),
                ("email_delete_email", {"email_id": email["email_id"]}),
                ("email_send_email", {"recipient": "raj.patel@atlas.com", "subject": "Plan", "body": "See you at ten."}),
                (
                    "calendar_create_event",
                    {
                        "event_name": "Sync",
                        "participant_email": "raj.patel@atlas.com",
                        "event_start": "2023-12-01 10:00:00",
                        "duration": "30",
                    },
                ),
                ("calendar_delete_event", {"event_id": event["event_id"]}),
                ("calendar_update_event", {"event_id": event["event_id"], "field": "event_name", "new_value": "Risk Forum"}),
                ("project_management_update_task", {"task_id": task["task_id"], "field": "list_name", "new_value": "Completed"}),
                (
                    "customer_relationship_manager_update_customer",
                    {"customer_id": customer["customer_id"], "field": "status", "new_value": "Lost"},
                ),
                (
                    "analytics_create_plot",
                    {"time_min": "2023-10-01", "time_max": "2023-11-01", "value_to_plot": "total_visits", "plot_type": "bar"},
                ),
            )
        )

    truth = [{"name": name, "arguments": json.dumps(given)} for name, given in (some() for _ in range(rng.randint(1, 3)))]
    return asking("Please do it.", ground_truth=truth, id=0, category="made", environment_name=NAME)


def answer(row: dict[str, Any], rng: random.Random) -> tuple[str, Items]:
    calls = [(call["name"], json.loads(call["arguments"])) for call in row["ground_truth"]]
    kinds = {"right": 35, "looked first": 10, "mutated": 25, "other case": 6, "one less": 6, "one twice": 5, "nothing": 3}
    kinds |= {"other order": 4, "a failing call more": 4, "broken JSON": 2, "numbers as numbers": 3}
    kind = pick(rng, kinds)
    place = rng.randrange(len(calls))
    name, arguments = calls[place]
    if kind == "looked first":
        looks = ("email_search_emails", {"query": "plan"}), ("company_directory_find_email_address", {"name": "raj"})
        calls.insert(0, rng.choice(looks))
    elif kind == "mutated":
        calls[place] = name, mutated_value(arguments, rng)
    elif kind == "other case":
        changed = {key: rng.choice((str(each).upper(), str(each).title())) for key, each in arguments.items()}
        calls[place] = name, arguments | rng.choice((changed, dict([rng.choice(list(changed.items()))])))
    elif kind == "one less":
        calls.pop(place)
    elif kind == "one twice":
        calls.append(calls[place])
    elif kind == "nothing":
        calls = []
    elif kind == "other order":
        rng.shuffle(calls)
    elif kind == "a failing call more":
        calls.insert(rng.randrange(len(calls) + 1), ("calendar_delete_event", {"event_id": "99999999"}))
    elif kind == "numbers as numbers":
        calls[place] = name, {key: int(each) if str(each).isdigit() else each for key, each in arguments.items()}
    items: Items = []
    for number, (called, given) in enumerate(calls):
        text = json.dumps(given)
        items.append(call_item(called, text[:-1] if kind == "broken JSON" and number == place else text, number))
        items.append(function_call_output_item(f"call_{number}", "{}"))
    return kind, [*items, message_item("Done.")]


def theirs(gym: Gym) -> Any:
    return gym.grader(NAME, "Workbench")


RULES = ()
