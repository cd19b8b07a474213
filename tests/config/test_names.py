"""Nearest names."""

from nemotron_steps.config.names import nearest


def test_a_word_of_a_name_finds_it_before_one_that_looks_alike():
    assert nearest("gpu", ["cpu", "default", "one_gpu", "tiny"])[0] == "one_gpu"
    assert nearest("node", ["mode", "one_node"])[0] == "one_node"


def test_a_name_mistyped_by_a_letter_is_found_before_one_that_it_is_a_word_of():
    assert nearest("step", ["seconds_per_step", "steps"])[0] == "steps"


def test_the_last_part_of_a_path_finds_it():
    assert nearest("max_num_steps", ["grpo.max_num_steps", "max_num_step"])[0] == "grpo.max_num_steps"
    assert nearest("rlhf", ["rl/nemo_rl/rlhf", "rl/nemo_rl/rlvr"])[0] == "rl/nemo_rl/rlhf"


def test_what_is_like_nothing_has_no_nearest_name():
    assert nearest("zebra", ["cpu", "one_gpu"]) == ()
