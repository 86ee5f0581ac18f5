"""The error that is retried."""


class ServerError(RuntimeError):
    """A server or process that rollout depends on failed, or gave no usable answer; the episode is retried.

    Raised by areax's own clients only. Any other exception from a workflow, RuntimeError included, is a bug in the
    user's code and ends the run.
    """
