"""How weights get from policy ranks to generators in other processes."""
