"""A clock for tests of what waits."""


class Clock:
    """Stands in for `time`: sleeping takes no time."""

    now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
