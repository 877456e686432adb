"""Messages between ranks: agreeing, broadcasting, reducing what is logged."""
