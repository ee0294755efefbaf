"""Child processes: started so that they end with their parent, started again, their logs kept small."""
