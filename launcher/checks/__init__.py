"""Everything that is checked and computed before anything is rented."""
