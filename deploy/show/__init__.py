"""What a person sees: screen, status, summary, answers."""
