"""The only room that imports torch: what runs inside one worker process. Never imports ray."""
