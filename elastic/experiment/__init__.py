"""`elastic experiment`: scenarios and seeds over live runs, and what came of them."""
