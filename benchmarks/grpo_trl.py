"""The peer: TRL's GRPOTrainer on the task of grpo_task.py, with the same model, batch, lengths and learning rate.

python -m benchmarks.grpo_trl FOLDER STEPS [--gpu]    prints one JSON object

With --gpu: the settings of bench_gpu.py, bfloat16, and vLLM in the trainer's process.
"""

import json
import statistics
import sys
import time
from pathlib import Path

from benchmarks.grpo_task import PeakMemory, reward_of

CPU = {
    "per_device_train_batch_size": 64,
    "max_completion_length": 32,
    "learning_rate": 1e-3,
    "use_cpu": True,
    "bf16": False,
}
GPU = {
    "per_device_train_batch_size": 64,
    "gradient_accumulation_steps": 8,
    "max_completion_length": 256,
    "learning_rate": 1e-5,
    "bf16": True,
    "use_vllm": True,
    "vllm_mode": "colocate",
    "vllm_gpu_memory_utilization": 0.25,
    "vllm_max_model_length": 384,
    "generation_kwargs": {"ignore_eos": False},
}


LARGE = {"per_device_train_batch_size": 16, "gradient_accumulation_steps": 32, "vllm_gpu_memory_utilization": 0.3}
"""Of 4 B parameters, with which more would not fit."""


def main(folder: Path, steps: int, gpu: bool, large: bool) -> None:
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    started = time.perf_counter()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    rows = [json.loads(line) for line in (folder / "train.jsonl").read_text().splitlines()]
    dataset = Dataset.from_list([{"prompt": row["responses_create_params"]["input"]} for row in rows])

    rewards: list[float] = []
    times: list[float] = []

    def reward(completions, **_):
        values = [reward_of(c[0]["content"]) for c in completions]
        rewards.append(sum(values) / len(values))
        return values

    class Clock(TrainerCallback):
        def on_step_begin(self, *_, **__):
            self.started = time.perf_counter()

        def on_step_end(self, *_, **__):
            times.append(time.perf_counter() - self.started)

    config = GRPOConfig(
        output_dir=str(folder / "trl"),
        num_generations=8,
        max_steps=steps,
        num_train_epochs=1000,
        lr_scheduler_type="constant",
        weight_decay=0.0,
        max_grad_norm=1.0,
        beta=0.0,
        temperature=1.0,
        logging_strategy="no",
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        gradient_checkpointing=False,
        seed=42,
        **({**GPU, **(LARGE if large else {})} if gpu else CPU),
    )
    completions = config.per_device_train_batch_size * config.gradient_accumulation_steps
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16 if gpu else torch.float32),
        reward_funcs=reward,
        args=config,
        train_dataset=dataset,
        processing_class=tokenizer,
        callbacks=[Clock()],
    )
    loaded = time.perf_counter() - started
    with PeakMemory() as memory:
        trainer.train()
    step = statistics.median(times[2 if gpu else 3 :])
    print(
        json.dumps(
            {
                "engine": "trl",
                "load_s": loaded,
                "step_s": step,
                "completions_per_s": completions / step,
                "step_times": times,
                "peak_gpu_gib": memory.peak_gib,
                "rewards": rewards,
            }
        )
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), "--gpu" in sys.argv, "4 B" in sys.argv)
