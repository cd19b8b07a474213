"""A small made-up company for workplace_assistant: the five databases where no others are configured.

The same on every machine. Ids begin at 90000001, so that a row written for other databases is never taken for one of
these.
"""

from __future__ import annotations

import random
from datetime import date, timedelta
from functools import cache

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
