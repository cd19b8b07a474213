"""What a verifier, or a check of a row, raises where it cannot do its work."""


class CannotJudgeError(Exception):
    """Raised inside verify: no judgement was possible, and the answer is not to blame. A failed verdict."""

    def __init__(self, failure: str, message: str = "", hint: str = "") -> None:
        super().__init__(f"{failure}: {message}" if message else failure)
        self.failure = failure
        self.message = message
        self.hint = hint


class GraderFailedError(CannotJudgeError):
    """Raised inside verify: grading ended with an error, over the answer or the row. As any exception, but named."""


class RowError(ValueError):
    """Raised inside check_values: one field of a row is unusable. check_row adds file and line."""

    def __init__(self, field_name: str, expected: str, found: str) -> None:
        super().__init__(f"{field_name}: expected {expected}, found {found}")
        self.field_name = field_name
        self.expected = expected
        self.found = found
