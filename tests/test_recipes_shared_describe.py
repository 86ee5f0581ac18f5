"""What is said of a batch's samples."""

import numpy as np

from areax.recipes.shared import describe
from areax.rollout.types import supervised


def test_one_very_low_log_probability_gives_no_warning_and_a_number():
    sample = supervised([3, 4], [5, 6], info={})
    sample = sample.replace(logp=np.float32([0, 0, -3.4e38, -1]), version=np.int32([-1, -1, 0, 0]))
    told = describe.agreement([sample], [np.float32([0, 0, -1, -1])], 0)
    assert told["max_logp_diff"] > 3e38 and np.isfinite(told["mismatch_k3_now"])
