//! The context of a request on its way to a state machine: the caller, the correlation id, the deadline and the idempotency key.

use actors::sharding::{id_created_by, id_of_name};
use actors::{AskError, CommandContext, CommandKey, CommandReply};
use axum::extract::{FromRequestParts, MatchedPath};
use axum::http::{Method, header, request};
use axum::response::Response;
use chrono::{DateTime, TimeDelta, Utc};
use domain::authz::{self, Action, Grant, TokenRole, authorize};
use domain::policy::Scopes;
use domain::role_bindings::RoleBindings;
use domain::state_machine::Command as _;
use domain::{CommandId, EntityKind, Machine, Principal};
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::marker::PhantomData;
use uuid::Uuid;

use crate::api::idempotency::request_layer::IdempotencyContext;
use crate::api::idempotency::{IdempotencyKey, ReplayedResponse, RequestLine};
use crate::api::rejection_response::{Explain, not_answered};
use crate::app_state::AppState;
use crate::auth::browser_session::has_session_cookie;
use crate::auth::{ActingServiceAccount, Caller, RevocableLogin};
use crate::console_session::session_caller;
use crate::http::correlation::Scope;
use crate::http::error::{ApiError, Code};
use crate::http::request_body::refuse_query;

use super::routing::{KeyRequired, NoQuery};
use crate::app_state::read_model::find;

/// How long an entity may take to reply.
const ASK_TIMEOUT: TimeDelta = TimeDelta::seconds(8);
/// How many transitions of the history are searched for the one that a replayed command made.
const HISTORY_SEARCHED: u32 = 1000;

/// A request by a caller with the role `user` or `admin`.
pub(crate) struct UserRequest(pub(crate) RequestContext);

/// A caller with the role `user` or `admin`, as the token names them: for connections that outlive the request.
pub(crate) struct AuthenticatedUser(pub(crate) Caller);

/// A request by an administrator.
pub(crate) struct AdminRequest(pub(crate) RequestContext);

/// A request by a caller that the table of permissions allows action `R`. Where the token's roles do not suffice, the platform roles of
/// the caller are read from Postgres, at every request.
pub(crate) struct Authorized<R> {
    pub(crate) context: RequestContext,
    action: PhantomData<R>,
}

/// An [`Action`] as a type, for a handler's signature.
pub(crate) trait RequiredAction {
    const ACTION: Action;
}

macro_rules! required_actions {
    ($($name:ident),+ $(,)?) => {$(
        pub(crate) enum $name {}

        impl RequiredAction for $name {
            const ACTION: Action = Action::$name;
        }
    )+};
}

required_actions! { AdjustBilling, SeeBilling, SettleProcessorEvents, SeeSkus, ApproveSkus, BindPlatformRoles, ReadAudit, RotateKeys }

/// The context of a request: the caller, the idempotency key and the trace. It has everything but the command.
pub(crate) struct RequestContext {
    pub(crate) caller: authz::CallerIdentity,
    pub(crate) token_expires_at: DateTime<Utc>,
    /// The service account, where the caller is one.
    pub(crate) acting: Option<ActingServiceAccount>,
    /// The login to check again while a connection of this request is open.
    pub(crate) revocable: Option<RevocableLogin>,
    /// The name under which the user logs in; none for a service account.
    pub(crate) username: Option<String>,
    /// The user's verified e-mail address; none for a service account.
    pub(crate) verified_email: Option<String>,
    app: AppState,
    scope: Scope,
    key: Option<IdempotencyKey>,
    /// Derived from the idempotency key, or new where the client gave none.
    command_id: CommandId,
    idempotency: IdempotencyContext,
    urgent: bool,
}

impl From<AdminRequest> for RequestContext {
    fn from(AdminRequest(context): AdminRequest) -> Self {
        context
    }
}

impl<R> From<Authorized<R>> for RequestContext {
    fn from(Authorized { context, .. }: Authorized<R>) -> Self {
        context
    }
}

impl FromRequestParts<AppState> for UserRequest {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut request::Parts, app: &AppState) -> Result<Self, ApiError> {
        let caller = rate_limited_caller(parts, app).await?;
        let context = RequestContext::of(caller, parts, app).await?;
        require_role(&context.caller)?;
        context.with_required_key(parts).map(Self)
    }
}

impl FromRequestParts<AppState> for AuthenticatedUser {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut request::Parts, app: &AppState) -> Result<Self, ApiError> {
        let caller = rate_limited_caller(parts, app).await?;
        require_role(&caller.clone().into_identity())?;
        Ok(Self(caller))
    }
}

fn require_role(caller: &authz::CallerIdentity) -> Result<(), ApiError> {
    if caller.roles.is_empty() {
        return Err(ApiError::forbidden(
            "Your account has neither the role `user` nor `admin`; ask an administrator for one.",
        ));
    }
    Ok(())
}

impl FromRequestParts<AppState> for AdminRequest {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut request::Parts, app: &AppState) -> Result<Self, ApiError> {
        let crate::auth::Admin(caller) = rate_limited_caller(parts, app).await?.into_admin()?;
        RequestContext::of(caller, parts, app).await?.with_required_key(parts).map(Self)
    }
}

impl<R: RequiredAction> FromRequestParts<AppState> for Authorized<R> {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut request::Parts, app: &AppState) -> Result<Self, ApiError> {
        let caller = rate_limited_caller(parts, app).await?;
        let context =
            RequestContext::of(caller, parts, app).await?.permitted(R::ACTION).await?.with_required_key(parts)?;
        Ok(Self { context, action: PhantomData })
    }
}

/// The platform roles of a subject, as Postgres has them now; `None` where the subject never had any.
pub(super) async fn grant_of(app: &AppState, subject: &str) -> Result<Option<Grant>, ApiError> {
    let id = id_of_name(EntityKind::Bindings, subject);
    Ok(find::<RoleBindings>(app, id).await?.map(|stored| stored.it.grant(id, stored.version)))
}

/// The refusal, with the roles that would suffice.
fn missing_role(action: Action) -> ApiError {
    let roles: Vec<_> = action.platform_roles().iter().map(|role| role.name()).collect();
    if roles.is_empty() {
        return ApiError::forbidden("This needs the role `admin`.");
    }
    let admin = if action.admits_administrators() { "the role `admin` or " } else { "" };
    let roles = roles.join("` or `");
    ApiError::forbidden(format!(
        "This needs {admin}the platform role `{roles}`; ask an administrator to bind it to you."
    ))
}

/// The caller, authenticated by the token and within the rate limit of the route's group.
async fn rate_limited_caller(parts: &mut request::Parts, app: &AppState) -> Result<Caller, ApiError> {
    let (policy, now) = (app.environment.policy(), app.environment.now());
    let caller = match authenticated_caller(parts, app).await {
        Ok(caller) => caller,
        Err(error) => {
            if matches!(error.code(), Code::Unauthenticated | Code::SessionEnded) {
                app.limiter.count_refused_token(parts, &policy, now)?;
            }
            return Err(error);
        }
    };
    let scopes = Scopes {
        user_id: Some(caller.user_id.clone()),
        project_id: caller.project_id.clone(),
        org_id: caller.org_id.clone(),
        plan: caller.plan.clone(),
    };
    app.limiter.take(parts.extensions.get(), &scopes, &policy, now).await?;
    if parts.extensions.get::<NoQuery>().is_some() {
        refuse_query(&parts.uri)?;
    }
    Ok(caller)
}

/// The caller that the request's bearer token names; without one, that of the browser session of its cookie.
async fn authenticated_caller(parts: &mut request::Parts, app: &AppState) -> Result<Caller, ApiError> {
    if parts.headers.contains_key(header::AUTHORIZATION) || !has_session_cookie(&parts.headers) {
        return Caller::from_request_parts(parts, app).await;
    }
    let caller = session_caller(app, parts).await?;
    if let Some(scope) = parts.extensions.get::<Scope>() {
        scope.record_caller(caller.org_id.as_deref(), caller.project_id.as_deref());
    }
    Ok(caller)
}

impl RequestContext {
    /// Checks that the key which the route requires is there. This follows authorization: an unauthorized caller learns nothing about the
    /// form of a request.
    fn with_required_key(self, parts: &request::Parts) -> Result<Self, ApiError> {
        if self.key.is_none() && parts.extensions.get::<KeyRequired>().is_some() {
            return Err(IdempotencyKey::required());
        }
        Ok(self)
    }

    async fn of(caller: Caller, parts: &mut request::Parts, app: &AppState) -> Result<Self, ApiError> {
        let route = parts.extensions.get::<MatchedPath>().map(|path| path.as_str().to_owned());
        let line = RequestLine {
            method: parts.method.clone(),
            route: route.ok_or_else(|| ApiError::internal("a handler runs outside of its route"))?,
            path: parts.uri.path().to_owned(),
        };
        let key = if parts.method == Method::POST { IdempotencyKey::of(&parts.headers)? } else { None };
        let (token_expires_at, acting) = (caller.token_expires_at, caller.acting.clone());
        let (verified_email, username) = (caller.verified_email.clone(), caller.username.clone());
        let revocable = caller.revocable_login();
        let caller = caller.into_identity();
        let by = Principal::Caller(caller.clone());
        let command_id = key.as_ref().map_or_else(|| CommandId(Uuid::new_v4()), |key| line.command_id(&by, key));
        let idempotency = parts.extensions.get::<IdempotencyContext>().cloned().unwrap_or_default();
        if key.is_some() {
            idempotency.set_caller(command_id, line, caller.clone(), app);
        }
        Ok(Self {
            token_expires_at,
            acting,
            revocable,
            username,
            verified_email,
            key,
            caller,
            app: app.clone(),
            scope: Scope::from_request_parts(parts, app).await?,
            command_id,
            idempotency,
            urgent: false,
        })
    }

    /// Authorizes the caller for `action`, by the token or by the platform roles that Postgres has for them now.
    ///
    /// # Errors
    /// `forbidden`, with the roles that would suffice.
    pub(crate) async fn permitted(mut self, action: Action) -> Result<Self, ApiError> {
        let suffices = |context: &Self| authorize(&context.principal(), action);
        if suffices(&self).is_err() {
            if !action.platform_roles().is_empty() && self.caller.service_account.is_none() {
                self.caller.grant = grant_of(&self.app, &self.caller.user_id).await?;
            }
            suffices(&self).map_err(|denied| missing_role(action).because(denied))?;
        }
        Ok(self)
    }

    /// Exempts the command from load shedding: for releases and operators' actions.
    pub(crate) fn prioritized(mut self) -> Self {
        self.urgent = true;
        self
    }

    pub(crate) fn principal(&self) -> Principal {
        Principal::Caller(self.caller.clone())
    }

    pub(crate) fn is_admin(&self) -> bool {
        self.caller.roles.contains(&TokenRole::Admin)
    }

    pub(crate) fn scopes(&self) -> Scopes {
        Scopes::from(&self.caller)
    }

    /// The id of what this request creates. A repetition gets another id in the same shard, where its command meets the first one's.
    pub(crate) fn new_id(&self) -> Uuid {
        id_created_by(self.command_id, self.app.environment.now())
    }

    /// True of an id that this request, or the request that it repeats, has created.
    pub(crate) fn has_created(&self, id: Uuid) -> bool {
        // The ids of one command differ in their times alone, the first 48 of the bits.
        let of_command = |id: Uuid| id.as_u128() << 48;
        of_command(id) == of_command(self.new_id())
    }

    /// The entity's reply to an earlier request with this key, where that was committed and its response was lost. A handler that resolves
    /// references before it sends a command looks here first: what existed then may be gone.
    ///
    /// # Errors
    /// `internal_error` where the reply cannot be read.
    pub(crate) fn committed_reply<M: Machine>(&self) -> Result<Option<CommandReply<M::Reply>>, ApiError> {
        let Some(reply) = self.idempotency.earlier_reply() else { return Ok(None) };
        let reply = serde_json::from_str(reply).map_err(ApiError::internal)?;
        self.idempotency.mark_committed();
        // The version is read where it is shown ([`RequestContext::version_of`]).
        Ok(Some(CommandReply { reply, replayed: true, written: false, version: 0 }))
    }

    /// Refuses a request before its command, unless an earlier request with this key was answered: then returns the entity's reply to that
    /// one.
    ///
    /// # Errors
    /// `refusal`, where this is the first request or the earlier one was refused too.
    pub(crate) async fn committed_reply_or<M: Machine>(
        &self,
        refusal: ApiError,
    ) -> Result<CommandReply<M::Reply>, ApiError> {
        self.idempotency.refuse_unless_committed(refusal).await?;
        self.committed_reply::<M>()?.ok_or_else(|| ApiError::internal("a committed command has no reply"))
    }

    /// The stored response to an earlier request with this key, for a route whose permission depends on its body: it asks after the check.
    /// `None` where there is none; the reply of a command that was committed is there from then on.
    pub(crate) async fn stored_response(&self) -> Result<Option<Response>, ApiError> {
        self.idempotency.replay().await
    }

    /// True where [`RequestContext::committed_reply`] has a reply.
    pub(crate) fn is_replay(&self) -> bool {
        self.idempotency.earlier_reply().is_some()
    }

    /// The response is computed again at each repetition and never stored, since it is a secret.
    pub(crate) fn never_store_response(&self) {
        self.idempotency.answer_changes();
    }

    /// The response to the committed command follows from the reply, and from what was resolved for it
    /// ([`RequestContext::ask_resolved`]): it is sent without a further write.
    pub(crate) fn answer_follows_from_commit(&self) {
        self.idempotency.answer_follows_from_commit();
    }

    /// As [`RequestContext::ask`], with what the response shows beside the reply: that is stored with the commit. For a repeated command it
    /// returns what was stored with the first one, where that was.
    pub(crate) async fn ask_resolved<M: Machine, R: Serialize + DeserializeOwned>(
        &self,
        id: Uuid,
        command: impl Into<M::Command>,
        resolved: R,
    ) -> Result<(CommandReply<M::Reply>, R), ApiError>
    where
        M::Rejection: Explain,
    {
        let text = serde_json::to_string(&resolved).map_err(ApiError::internal)?;
        let answered = self.try_ask_resolved::<M>(id, command, Some(text)).await?.map_err(not_answered)?;
        let stored = if answered.replayed { self.idempotency.resolved().await? } else { None };
        match stored {
            Some(stored) => Ok((answered, serde_json::from_str(&stored).map_err(ApiError::internal)?)),
            // The first request, or one that a member of the release before this one has committed.
            None => Ok((answered, resolved)),
        }
    }

    /// Sends `command` to an entity. It commits at most once, however often the request is repeated.
    pub(crate) async fn ask<M: Machine>(
        &self,
        id: Uuid,
        command: impl Into<M::Command>,
    ) -> Result<CommandReply<M::Reply>, ApiError>
    where
        M::Rejection: Explain,
    {
        self.try_ask::<M>(id, command).await?.map_err(not_answered)
    }

    /// As [`RequestContext::ask`], for handlers that map the rejection themselves.
    pub(crate) async fn try_ask<M: Machine>(
        &self,
        id: Uuid,
        command: impl Into<M::Command>,
    ) -> Result<Result<CommandReply<M::Reply>, AskError<M::Rejection>>, ApiError> {
        self.try_ask_resolved::<M>(id, command, None).await
    }

    async fn try_ask_resolved<M: Machine>(
        &self,
        id: Uuid,
        command: impl Into<M::Command>,
        resolved: Option<String>,
    ) -> Result<Result<CommandReply<M::Reply>, AskError<M::Rejection>>, ApiError> {
        if let Some(answered) = self.committed_reply::<M>()? {
            return Ok(Ok(answered));
        }
        let key = self.idempotency.command()?.map(|key| CommandKey { resolved, ..key });
        let answer = self.send::<M>(id, command.into(), |command_context| match key {
            Some(key) => command_context.with_key(key),
            None => command_context,
        });
        let answer = answer.await?;
        if answer.as_ref().is_ok_and(|answered| answered.written || answered.replayed) {
            self.idempotency.mark_committed();
        }
        Ok(answer)
    }

    /// Sends a command whose response is a secret: nothing of it is stored, so a repetition is a new command.
    pub(crate) async fn ask_unstored<M: Machine>(
        &self,
        id: Uuid,
        command: impl Into<M::Command>,
    ) -> Result<CommandReply<M::Reply>, ApiError>
    where
        M::Rejection: Explain,
    {
        self.try_ask_unstored::<M>(id, command).await?.map_err(not_answered)
    }

    /// As [`RequestContext::ask_unstored`], for handlers that map the rejection themselves.
    pub(crate) async fn try_ask_unstored<M: Machine>(
        &self,
        id: Uuid,
        command: impl Into<M::Command>,
    ) -> Result<Result<CommandReply<M::Reply>, AskError<M::Rejection>>, ApiError>
    where
        M::Rejection: Explain,
    {
        self.send::<M>(id, command.into(), |command_context| command_context).await
    }

    /// Sends a command that follows from the request beside the caller's own, with the service's part `part` as the principal.
    pub(crate) async fn ask_as_system<M: Machine>(
        &self,
        part: &str,
        id: Uuid,
        command: impl Into<M::Command>,
    ) -> Result<CommandReply<M::Reply>, AskError<M::Rejection>> {
        let command = command.into();
        let permit = authorize(&Principal::system(part), command.action())
            .map_err(|denied| AskError::Unavailable { reason: denied.to_string() })?;
        let command_context = self.scope.command_context(&permit, self.app.environment.now() + ASK_TIMEOUT);
        self.app.directory.ask::<M>(&permit, id, command, command_context).await
    }

    async fn send<M: Machine>(
        &self,
        id: Uuid,
        command: M::Command,
        once: impl FnOnce(CommandContext) -> CommandContext,
    ) -> Result<Result<CommandReply<M::Reply>, AskError<M::Rejection>>, ApiError> {
        self.scope.record_resource(format_args!("{}/{id}", M::KIND));
        let permit = authorize(&self.principal(), command.action()).map_err(|denied| {
            let message = match &self.acting {
                Some(_) => "A service account may not do this; log in as a person who may.",
                None => "Your role does not allow this; ask an administrator.",
            };
            ApiError::forbidden(message).because(denied)
        })?;
        let deadline = self.app.environment.now() + ASK_TIMEOUT;
        let command_context = once(self.scope.command_context(&permit, deadline));
        let command_context = if self.urgent { command_context.urgent() } else { command_context };
        Ok(self.app.directory.ask::<M>(&permit, id, command, command_context).await)
    }

    /// The version that the command led to and its time: for a replayed command those of the first execution.
    pub(crate) async fn transition_of<R>(
        &self,
        id: Uuid,
        answered: &CommandReply<R>,
    ) -> Result<(i64, DateTime<Utc>), ApiError> {
        let reads = &self.app.reads;
        let found = if answered.replayed {
            let id_of_command = self.command_id;
            let rows = reads.history(id, None, HISTORY_SEARCHED).await?.items;
            rows.into_iter().find(|row| row.command_id == Some(id_of_command))
        } else {
            reads.history(id, Some(answered.version.saturating_add(1)), 1).await?.items.pop()
        };
        Ok(found.map_or_else(|| (answered.version, self.app.environment.now()), |row| (row.version, row.at)))
    }

    /// The version alone. The reply to a first request has it, so that nothing is read.
    pub(crate) async fn version_of<R>(&self, id: Uuid, answered: &CommandReply<R>) -> Result<i64, ApiError> {
        if answered.replayed { Ok(self.transition_of(id, answered).await?.0) } else { Ok(answered.version) }
    }
}

/// The header of a replayed response.
pub(crate) const fn replayed<R>(answered: &CommandReply<R>) -> ReplayedResponse {
    ReplayedResponse(answered.replayed)
}
