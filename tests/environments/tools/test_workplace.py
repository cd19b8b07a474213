import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from nemotron_steps.environments.base import Environment, GradeResult, Response, Session, ToolCall
from nemotron_steps.environments.environment_set import EnvironmentSet
from nemotron_steps.environments.registry import create
from nemotron_steps.environments.tools.workplace_assistant import FILES
from nemotron_steps.errors import DataError, UnsupportedError

TABLES = {
    "email": "email_id,inbox/outbox,sender/recipient,subject,sent_datetime,body\n"
    "00000007,inbox,carlos@x.com,Task update,2023-11-29 10:00:00,Please reply\n"
    "00000009,inbox,nadia@x.com,Lunch,2023-11-28 09:00:00,Friday?\n",
    "calendar": "event_id,event_name,participant_email,event_start,duration\n"
    "00000001,Review,nadia@x.com,2023-11-30 10:00:00,30\n",
    "analytics": "date_of_visit,visitor_id,page_views,session_duration_seconds,traffic_source,user_engaged\n"
    "2023-11-29,11,3,10,direct,True\n2023-11-29,12,1,20,referral,False\n2023-11-30,13,1,5,direct,True\n",
    "project_management": "task_id,task_name,assigned_to_email,list_name,due_date,board\n"
    "00000003,Fix login,carlos@x.com,Backlog,2023-12-01,Back end\n",
    "customer_relationship_manager": "customer_id,assigned_to_email,customer_name,customer_email,customer_phone,"
    "last_contact_date,product_interest,status,follow_up_by,notes\n"
    "00000005,nadia@x.com,Ann Lee,ann@y.com,,2023-10-01,Consulting,Proposal,2023-12-01,\n",
}


@pytest.fixture
def environment(tmp_path: Path) -> Environment:
    for name, text in TABLES.items():
        (tmp_path / FILES[name]).write_text(text)
    return create("workplace_assistant", {"databases": str(tmp_path)})


def call(tool: str, /, **arguments: Any) -> dict[str, Any]:
    return {"name": tool, "arguments": json.dumps(arguments)}


def row(*truth: dict[str, Any]) -> dict[str, Any]:
    return {"responses_create_params": {"input": "Do it."}, "ground_truth": list(truth)}


def grade(environment: Environment, truth: list[dict[str, Any]], made: list[dict[str, Any]]) -> GradeResult:
    task = row(*truth)
    environment.check_row(task, "f:1")

    async def rollout() -> GradeResult:
        await environment.start()
        session = await environment.seed(task)
        for item in made:
            await environment.call_tool(session, item["name"], json.loads(item["arguments"]))
        return (await environment.verify_group(task, [Response("done")], [session]))[0]

    return asyncio.run(rollout())


REPLY = call("email_reply_email", email_id="00000007", body="Thanks")


@pytest.mark.parametrize(
    ("made", "reward"),
    [
        ([REPLY], 1.0),
        ([call("email_search_emails", query="task carlos"), REPLY], 1.0),
        ([call("email_reply_email", email_id="00000007", body="THANKS")], 1.0),
        ([call("email_send_email", recipient="carlos@x.com", subject="Task update", body="Thanks")], 1.0),
        ([call("email_reply_email", email_id="00000009", body="Thanks")], 0.0),
        ([REPLY, REPLY], 0.0),
        ([REPLY, call("calendar_delete_event", event_id="00000001")], 0.0),
        ([], 0.0),
    ],
)
def test_the_final_state_decides_not_the_way(
    environment: Environment, made: list[dict[str, Any]], reward: float
) -> None:
    assert grade(environment, [REPLY], made).reward == reward


CHANGES = [
    call("email_forward_email", email_id="00000009", recipient="sam@x.com"),
    call(
        "calendar_create_event",
        event_name="Call",
        participant_email="a@x.com",
        event_start="2023-12-01 09:00:00",
        duration="30",
    ),
    call("calendar_update_event", event_id="00000001", field="duration", new_value="60"),
    call(
        "analytics_create_plot",
        time_min="2023-11-29",
        time_max="2023-11-30",
        value_to_plot="total_visits",
        plot_type="bar",
    ),
    call("project_management_update_task", task_id="00000003", field="list_name", new_value="Completed"),
    call("customer_relationship_manager_update_customer", customer_id="00000005", field="status", new_value="Lost"),
    call("customer_relationship_manager_add_customer", customer_name="Bo", assigned_to_email="a@x.com", status="Lead"),
]


@pytest.mark.parametrize("change", CHANGES, ids=[change["name"] for change in CHANGES])
def test_every_writing_tool_changes_the_state(environment: Environment, change: dict[str, Any]) -> None:
    assert grade(environment, [change], [change]).reward == 1.0
    assert grade(environment, [], [change]).reward == 0.0


@pytest.mark.parametrize(
    "wrong",
    [
        call("email_reply_email", email_id="404", body="x"),
        call("calendar_update_event", event_id="00000001", field="color", new_value="red"),
        call("email_send_email", recipient="nobody", subject="s", body="b"),
        call("project_management_create_task", colour="red"),
        call("email_search_emails", page="many"),
        call("customer_relationship_manager_search_customers", page_size=float("inf")),
    ],
)
def test_a_models_mistake_is_an_output_and_changes_nothing(environment: Environment, wrong: dict[str, Any]) -> None:
    assert grade(environment, [], [wrong]).reward == 1.0

    async def run() -> str:
        return await environment.call_tool(await environment.seed(row()), wrong["name"], json.loads(wrong["arguments"]))

    assert "Error" in asyncio.run(run())


def test_rollouts_do_not_share_databases_and_recorded_calls_are_replayed(environment: Environment) -> None:
    assert grade(environment, [REPLY], [REPLY]).reward == 1.0
    assert grade(environment, [REPLY], [REPLY]).reward == 1.0
    recorded = Response("done", tool_calls=[ToolCall(REPLY["name"], REPLY["arguments"])])
    verdict = asyncio.run(environment.verify(row(REPLY), recorded, Session()))
    assert (verdict.reward, verdict.components) == (1.0, {"tool_calls": 1.0})


def test_without_databases_they_are_empty() -> None:
    environment = create("workplace_assistant")
    sent = call("email_send_email", recipient="ann@x.com", subject="Hi", body="Thanks")
    environment.check_row_with_resources(row(sent), "f:1")
    assert grade(environment, [sent], [sent]).reward == 1.0
    assert grade(environment, [sent], []).reward == 0.0


def test_databases_that_cannot_be_read_are_told_every_time(environment: Environment, tmp_path: Path) -> None:
    (tmp_path / FILES["calendar"]).unlink()
    for _ in range(2):
        with pytest.raises(UnsupportedError, match="not there"):
            asyncio.run(environment.seed(row()))


def test_a_row_for_other_databases_is_refused_by_the_run_and_not_by_data_preparation() -> None:
    environment = create("workplace_assistant")
    foreign = row(call("email_reply_email", email_id="00000057", body="Thanks"))
    environment.check_row(foreign, "f:1")
    with pytest.raises(DataError, match=r"ground_truth\[0\]") as caught:
        environment.check_row_with_resources(foreign, "f:1")
    assert "databases=FOLDER" in str(caught.value.expected)
    with pytest.raises(DataError):
        EnvironmentSet({}, {}, only="workplace_assistant").check_rows([(foreign, "f:1")])


@pytest.mark.parametrize(
    "wrong", [call("email_reply_email", email_id="404", body="x"), {"name": "x", "arguments": "{"}]
)
def test_a_ground_truth_that_fails_judges_no_answer(environment: Environment, wrong: dict[str, Any]) -> None:
    async def judged() -> list[GradeResult]:
        sessions = [Session(), await environment.seed(row())]
        return await environment.verify_group(row(REPLY, wrong), [Response("x")] * 2, sessions)

    for verdict in asyncio.run(judged()):
        assert (verdict.reward, verdict.failure) == (None, "ground_truth_fails")
        assert "ground_truth[1]" in verdict.details["message"]
