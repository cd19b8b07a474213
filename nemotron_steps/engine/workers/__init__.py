"""Ray actors with names, what their failures mean, and ports that are bound before they are announced."""
