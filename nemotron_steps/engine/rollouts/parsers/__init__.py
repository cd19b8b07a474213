"""How assistant text is taken apart, by the names that `policy.generation.{reasoning_parser,tool_parser}` use."""
