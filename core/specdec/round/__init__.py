"""The speculative round: transaction, completion records, arena. Needs torch except ``completion``; import by module."""
