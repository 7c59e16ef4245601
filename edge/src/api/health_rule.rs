//! The table of health findings, and the overrides of administrators (decision 0051).

use actors::sharding::id_of_name;
use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::IntoResponse;
use chrono::{DateTime, Utc};
use domain::EntityKind;
use domain::finding::{CodePattern, FindingCause, FindingClass, FindingScope, Judgement, Repair, RuleOverride, TABLE};
use domain::health_rules::{Command, HealthRules, NAME, Reply};
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use utoipa::{IntoParams, ToSchema};
use uuid::Uuid;

use super::request_context::{AdminRequest, replayed};
use super::request_fields::{FindingPattern, Reason, TenantMessage};
use crate::api::idempotency::request_layer::Idempotent;
use crate::app_state::AppState;
use crate::app_state::read_model;
use crate::http::error::ApiError;
use crate::http::request_body::{self, Query};

/// A class of a finding.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Deserialize, Serialize, ToSchema)]
#[serde(rename_all = "snake_case")]
#[schema(as = FindingClass)]
pub(super) enum ClassName {
    /// No new allocation gets the GPU, or the machine.
    PreventAllocation,
    /// Its tenant has to leave within policy `node.evacuate_seconds`.
    Evacuate,
    /// Its tenant pays nothing from the fault on.
    BillingCredit,
    /// The node is in quarantine until the finding is over or cleared.
    Quarantine,
    /// It is shown.
    Warn,
}

/// What can cause a finding.
#[derive(Clone, Copy, Debug, Default, Deserialize, Serialize, ToSchema)]
#[serde(rename_all = "snake_case")]
#[schema(as = FindingCause)]
pub(super) enum CauseName {
    /// A tenant's program can: it has the class `warn` alone.
    Tenant,
    #[default]
    Hardware,
    /// The driver, or the operating system.
    Software,
}

/// What repairs a finding.
#[derive(Clone, Copy, Debug, Default, Deserialize, Serialize, ToSchema)]
#[serde(rename_all = "snake_case")]
#[schema(as = FindingRepair)]
pub(super) enum RepairName {
    /// It ends by itself.
    #[default]
    None,
    /// A reset of the GPU.
    Reset,
    /// A reboot of the machine.
    Reboot,
    /// An operator: the finding stays until one clears it.
    Operator,
}

/// An override to be written.
#[derive(Debug, Deserialize, Serialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(as = NewHealthRule)]
pub(super) struct NewHealthRule {
    /// The findings that it is for. It is for the codes below its code too: xid/145 is for 145.fatal. The longest pattern wins; where two differ in the `*` alone, the one without it.
    pattern: FindingPattern,
    /// What follows from them.
    #[schema(min_items = 1, max_items = 4)]
    classes: BTreeSet<ClassName>,
    #[serde(default)]
    cause: CauseName,
    #[serde(default)]
    repair: RepairName,
    /// Required with `evacuate` or `billing_credit`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    tenant_message: Option<TenantMessage>,
    reason: Reason,
}

/// The override to take back.
#[derive(Debug, Deserialize, Serialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(super) struct OverrideQuery {
    #[param(inline)]
    pattern: FindingPattern,
    /// Why; recorded in the audit log.
    #[param(inline)]
    reason: Reason,
}

/// The whole table; it has no pages.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = HealthRules)]
pub(super) struct HealthRulesView {
    /// The rows, as they hold with the overrides.
    items: Vec<RuleView>,
    overrides: Vec<OverrideView>,
}

/// A row of the table.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = HealthRule)]
pub(super) struct RuleView {
    /// Such as `xid`.
    probe: &'static str,
    /// Such as `79`.
    code: &'static str,
    /// `gpu` or `machine`.
    scope: &'static str,
    classes: Vec<&'static str>,
    /// `tenant`, `hardware` or `software`.
    cause: &'static str,
    /// `none`, `reset`, `reboot` or `operator`.
    repair: &'static str,
    meaning: &'static str,
    /// Empty where nothing concerns the tenant.
    tenant_message: String,
    /// The pattern of the override that holds in place of the row; null where none does.
    overridden_by: Option<String>,
}

/// An override, and its author.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = HealthRuleOverride)]
pub(super) struct OverrideView {
    pattern: String,
    classes: Vec<&'static str>,
    cause: &'static str,
    repair: &'static str,
    tenant_message: String,
    reason: String,
    written_by: String,
    written_at: DateTime<Utc>,
}

/// The table of health findings with its overrides: what follows from each, what causes it, what repairs it.
#[utoipa::path(get, path = "/", responses((status = 200, description = "The table.", body = HealthRulesView)))]
pub(super) async fn list(_: AdminRequest, State(app): State<AppState>) -> Result<Json<HealthRulesView>, ApiError> {
    let stored = read_model::current::<HealthRules>(&app, rules_id()).await?;
    let overrides = stored.map(|stored| stored.it.overrides.clone()).unwrap_or_default();
    let items = TABLE.iter().map(|rule| {
        let judgement = overrides.judgement_of(rule.probe, rule.code);
        let classes: Vec<FindingClass> =
            judgement.map_or_else(|| rule.classes.to_vec(), |it| it.classes.iter().copied().collect());
        RuleView {
            probe: rule.probe,
            code: rule.code,
            scope: match rule.scope {
                FindingScope::Gpu => "gpu",
                FindingScope::Machine => "machine",
            },
            classes: classes.into_iter().map(Into::into).collect(),
            cause: judgement.map_or(rule.cause, |it| it.cause).into(),
            repair: judgement.map_or(rule.repair, |it| it.repair).into(),
            meaning: rule.meaning,
            tenant_message: judgement.map_or_else(|| rule.tenant_message.to_owned(), |it| it.tenant_message.clone()),
            overridden_by: judgement.map(|it| it.pattern.to_string()),
        }
    });
    let items = items.collect();
    Ok(Json(HealthRulesView { items, overrides: overrides.0.into_values().map(OverrideView::of).collect() }))
}

/// Overrides the table for the findings of a pattern, also for findings that no row has.
///
/// It holds for a node from its next heartbeat after every process has read it, within a second; while the message bus is down, within a
/// minute. Findings that are stored already are judged by it too: `billing_credit` counts from the time of the fault. What a tenant's
/// program can cause gets no class but `warn`.
#[utoipa::path(
    post,
    path = "/",
    request_body = NewHealthRule,
    responses((status = 201, description = "The override as it was written.", body = OverrideView)),
)]
pub(super) async fn write(
    AdminRequest(context): AdminRequest,
    Idempotent(request_body::Json(new)): Idempotent<request_body::Json<NewHealthRule>>,
) -> Result<impl IntoResponse, ApiError> {
    let judgement = Judgement {
        pattern: parse(&new.pattern)?,
        classes: new.classes.iter().map(|class| (*class).into()).collect(),
        cause: new.cause.into(),
        repair: new.repair.into(),
        tenant_message: new.tenant_message.as_ref().map(|message| message.to_string()).unwrap_or_default(),
    };
    let command = Command::Write { judgement: Box::new(judgement), reason: new.reason.to_string() };
    let answered = context.ask::<HealthRules>(rules_id(), command).await?;
    match &answered.reply {
        Reply::Written { written } => {
            let view = OverrideView::of(RuleOverride::clone(written));
            Ok((StatusCode::CREATED, replayed(&answered), Json(view)))
        }
        Reply::Done => Err(ApiError::internal("the health rules replied done to a write")),
    }
}

/// Takes an override back: the table's row holds again, from the next heartbeat of each node on.
///
/// A meter that it has stopped stays stopped.
#[utoipa::path(
    delete,
    path = "/",
    params(OverrideQuery),
    responses((status = 204, description = "It is taken back.")),
)]
pub(super) async fn take_back(
    AdminRequest(context): AdminRequest,
    Query(query): Query<OverrideQuery>,
) -> Result<StatusCode, ApiError> {
    let command = Command::TakeBack { pattern: parse(&query.pattern)?, reason: query.reason.to_string() };
    context.ask::<HealthRules>(rules_id(), command).await?;
    Ok(StatusCode::NO_CONTENT)
}

fn rules_id() -> Uuid {
    id_of_name(EntityKind::HealthRules, NAME)
}

fn parse(pattern: &FindingPattern) -> Result<CodePattern, ApiError> {
    CodePattern::parse(pattern).ok_or_else(|| {
        ApiError::invalid_request("`pattern` must be a probe, a slash and a code, such as xid/79 or xid/14*.")
            .detail("field", "pattern")
    })
}

impl OverrideView {
    fn of(RuleOverride { judgement, reason, written_by, written_at }: RuleOverride) -> Self {
        let Judgement { pattern, classes, cause, repair, tenant_message } = judgement;
        Self {
            pattern: pattern.to_string(),
            classes: classes.into_iter().map(Into::into).collect(),
            cause: cause.into(),
            repair: repair.into(),
            tenant_message,
            reason,
            written_by,
            written_at,
        }
    }
}

impl From<ClassName> for FindingClass {
    fn from(name: ClassName) -> Self {
        match name {
            ClassName::PreventAllocation => Self::PreventAllocation,
            ClassName::Evacuate => Self::Evacuate,
            ClassName::BillingCredit => Self::BillingCredit,
            ClassName::Quarantine => Self::Quarantine,
            ClassName::Warn => Self::Warn,
        }
    }
}

impl From<CauseName> for FindingCause {
    fn from(name: CauseName) -> Self {
        match name {
            CauseName::Tenant => Self::Tenant,
            CauseName::Hardware => Self::Hardware,
            CauseName::Software => Self::Software,
        }
    }
}

impl From<RepairName> for Repair {
    fn from(name: RepairName) -> Self {
        match name {
            RepairName::None => Self::None,
            RepairName::Reset => Self::Reset,
            RepairName::Reboot => Self::Reboot,
            RepairName::Operator => Self::Operator,
        }
    }
}
