"""From prompts to graded rollouts: data, conversations with tools, agents, held-out evaluation."""
