"""The parts of a run, each from its validated config, in this process. Where a part lives is engine/placement's."""
