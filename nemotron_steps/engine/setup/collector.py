"""What samples and grades rollouts; agents are offered the policy's endpoint where the config asks for it."""

from contextlib import ExitStack

from nemotron_steps.config.schema.policy import GenerationConfig
from nemotron_steps.engine.generation.sampler import AsyncSampler
from nemotron_steps.engine.reporting import Reporter
from nemotron_steps.engine.rollouts.collector import RolloutCollector
from nemotron_steps.engine.rollouts.conversation import TurnFormat
from nemotron_steps.engine.setup.backends import sampling_params
from nemotron_steps.engine.setup.rows import Needs
from nemotron_steps.environments.environment_set import POLICY_NAME, EnvironmentSet
from nemotron_steps.models.chat import ChatFormat


def build_collector(
    config: GenerationConfig,
    chat: ChatFormat,
    sampler: AsyncSampler,
    environments: EnvironmentSet,
    needs: Needs,
    *,
    seed: int,
    max_total_length: int,
    longest: int,
    reporter: Reporter,
    resources: ExitStack,
    max_turns: int = 1,
) -> RolloutCollector:
    """The collector of a run. Creates every environment that the rows need; none is started."""
    turn_format = TurnFormat.of(config, chat)
    if config.vllm_cfg.expose_http_server:
        from nemotron_steps.engine.serving.endpoint import Endpoint

        endpoint = resources.enter_context(
            Endpoint(
                sampler,
                chat,
                name=POLICY_NAME,
                max_total_length=longest,
                # Not seeded: requests come in no fixed order. A request may bring a seed of its own.
                defaults=sampling_params(config, chat, seed=None),
                turn_format=turn_format,
            )
        )
        environments.offer_policy(endpoint.url, endpoint.model_name)
        reporter.event("policy_endpoint", url=endpoint.url, model=endpoint.model_name)
    for name in needs.environments:
        environments.get(name)
    return RolloutCollector(
        sampler,
        chat,
        environments,
        sampling_params(config, chat, seed),
        max_total_length=max_total_length,
        max_turns=max_turns,
        turn_format=turn_format,
        reporter=reporter,
    )
