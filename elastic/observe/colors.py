"""The colours of the reports: of each bucket of time, and of each phase of a recovery."""

BUCKETS = {
    "productive": "#3a923a",
    "idle": "#a3c585",
    "starting": "#b9c4d0",
    "waiting": "#8895a5",
    "recovering": "#d1495b",
    "retried": "#edae49",
    "growing": "#00798c",
    "rolled_back": "#7a2e3a",
    "ending": "#6b7f94",
    "absent": "#f1f1f1",
    "down": "#444444",
    "unsettled": "#c9b8d8",
}
PHASES = {
    "detect_s": "#edae49",
    "fence_s": "#d1495b",
    "waiting_s": "#8895a5",
    "form_s": "#00798c",
    "state_s": "#66a182",
    "restore_s": "#66a182",
    "first_step_s": "#2e4057",
}
"""In the order of time; a report has either state_s or restore_s."""
