"""placeholder run"""
from pathlib import Path
from tests.test_training_run import rows, train


def test_healthy(micro_experiment: Path) -> None:
    for extra in ([], ["bucketing.strategy=packed"], ["train.compute_dtype=bfloat16"],["target.dtype=bfloat16"]):
        run = train(micro_experiment, "h"+str(len(extra)) + (extra[0].replace(".","") if extra else "").replace("=",""), "train.max_steps=2", *extra)
        print([r for r in rows(run, "events") if r["kind"] == "self_check"])
