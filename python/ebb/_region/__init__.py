"""Where ops are intercepted: regions, the ways into them, what is said inside of them."""
