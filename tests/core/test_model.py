"""The core does what the model of a run does in every story, and shows the same after every event."""

import os

import pytest

from .stories import difference, shortest, story_of

STORIES = int(os.environ.get("ORACULO_TEST_SEEDS", "500"))
SHARDS = 4


@pytest.mark.timeout(300)
@pytest.mark.parametrize("shard", range(SHARDS))
def test_the_core_and_the_model_agree(shard: int) -> None:
    for seed in range(shard, STORIES, SHARDS):
        story = story_of(seed)
        if difference(story):
            story = shortest(story)
            pytest.fail(f"seed {seed}\n{story}\n{difference(story)}", pytrace=False)
