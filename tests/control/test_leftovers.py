"""After a controller's death its driver ends what is left of the run, whatever ends meanwhile."""

import ray

from elastic.on_ray.driver.submission import end_leftovers


def test_an_actor_that_ends_between_two_looks_does_not_keep_the_others_alive(monkeypatch):
    names = [f"elastic-1-{n}" for n in ("rendezvous", "w0", "w1")] + ["elastic-12-w0", "other"]
    named = [{"name": name, "namespace": "elastic"} for name in names]
    monkeypatch.setattr(ray.util, "list_named_actors", lambda all_namespaces: named)
    killed = list[str]()

    def get_actor(name: str, namespace: str) -> str:
        if name == "elastic-1-w0":
            raise ValueError(f"Failed to look up actor with name '{name}'")
        return name

    monkeypatch.setattr(ray, "get_actor", get_actor)
    monkeypatch.setattr(ray, "kill", lambda actor, no_restart: killed.append(actor))
    end_leftovers("elastic-1")
    assert killed == ["elastic-1-rendezvous", "elastic-1-w1"]
