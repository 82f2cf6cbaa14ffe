"""What each tenant has had since the engine was made."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace

from paceline.core.request import Request
from paceline.core.scheduler import Scheduler

MAX_TENANTS = 1000  # with an account of their own, beside those that the operator names
# Everybody else together. No tenant can have this name: it has a blank.
ALL_OTHERS = "(all others)"


@dataclass(slots=True)
class TenantUsage:
    """Sums over completions, and what there is of them at this moment. Seconds are the engine's own, and tokens those
    that clients are told.

    Attributes:
        completions: that were queued. For one that never ran nothing else counts.
        prompt_tokens: once for each completion of a prompt.
        cached_prompt_tokens: of these, those whose KV was there.
        draft_steps: verify steps with a draft to verify.
        engine_seconds: charged. The share of a step that ran when its request was aborted is not in it.
        rejected_seconds: of these, what rejected drafts took.
        saved_seconds: what the same tokens would have taken without drafts, less what they took; by the cost model.
        queue_seconds: from arrival to admission.
        outcomes: requests by how they ended, in the words of whoever serves them, who also counts them.
        running, waiting: completions; only a report has them.
        service_seconds: charged over weight, lifted where it would be credit; likewise. Of ALL_OTHERS the highest.
    """

    completions: int = 0
    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    completion_tokens: int = 0
    draft_steps: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    engine_seconds: float = 0.0
    rejected_seconds: float = 0.0
    saved_seconds: float = 0.0
    queue_seconds: float = 0.0
    preemptions: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    running: int = 0
    waiting: int = 0
    service_seconds: float = 0.0

    def book(self, request: Request) -> None:
        """Add what a completion has had so far."""
        if request.first_scheduled is None:
            return
        self.prompt_tokens += len(request.prompt_token_ids)
        self.cached_prompt_tokens += request.num_cached_tokens
        self.completion_tokens += len(request.output_token_ids)
        self.engine_seconds += request.charged_seconds
        self.queue_seconds += request.first_scheduled - request.arrival
        self.preemptions += request.num_preemptions
        for counts in request.counts_by_method.values():
            self.draft_steps += counts.draft_steps
            self.drafted_tokens += counts.drafted
            self.accepted_tokens += counts.accepted
            self.rejected_seconds += counts.rejected_seconds
            self.saved_seconds += counts.saved_seconds

    def copy(self) -> TenantUsage:
        return replace(self, outcomes=self.outcomes.copy())


class Usage:
    """The accounts of all tenants. A step costs them nothing: completions are booked when they end, and those that are
    live are added up when somebody asks.

    Args:
        scheduler: knows the live completions, and whom the operator names.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._accounts: dict[str, TenantUsage] = {}

    def name_of(self, tenant: str) -> str:
        """The name of the account that the tenant's usage is booked to: the tenant's own, or ALL_OTHERS."""
        accounts, named = self._accounts, self._scheduler.tenants.policies
        return tenant if tenant in accounts or len(accounts) < MAX_TENANTS or tenant in named else ALL_OTHERS

    def of(self, tenant: str) -> TenantUsage:
        """The account itself: what has ended. New if there is none."""
        return self._accounts.setdefault(self.name_of(tenant), TenantUsage())

    def report(self) -> dict[str, TenantUsage]:
        """Copies of all accounts by name, with what live completions have had so far."""
        report = {name: account.copy() for name, account in self._accounts.items()}
        for request in self._scheduler.requests.values():
            # A reload may name a tenant whose usage was booked to all others until then.
            report.setdefault(self.name_of(request.tenant), TenantUsage()).book(request)
        for tenant in self._scheduler.tenants:
            name = self.name_of(tenant.name)
            usage = report.setdefault(name, TenantUsage()) if tenant.coming else report.get(name)
            if usage is not None:  # else it has asked for something, and been refused
                usage.running += tenant.num_running
                usage.waiting += tenant.num_queued
                usage.service_seconds = max(usage.service_seconds, tenant.service)
        return report
