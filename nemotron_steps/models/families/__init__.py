"""How each family's config.json is read, and which parameters its layers have: a module for families that are alike."""
