"""The errors that are retried."""


class ServerError(RuntimeError):
    """A server or process that rollout depends on failed, or gave no usable answer; the episode is retried.

    Raised by areax's own clients only. Any other exception from a workflow, RuntimeError included, is a bug in the
    user's code and ends the run.
    """


class WrongSample(ServerError):
    """A sample that must not be trained on: a wrong value in it would become another token or another policy.

    An episode that returns one is retried, then left out, as for a failing server.
    """
