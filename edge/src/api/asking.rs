//! From a request to a machine: who asks, under which correlation, until when, and what makes it repeatable.

use actors::place::{id_created_by, id_of_name};
use actors::{Answered, AskError, Asked};
use axum::extract::{FromRequestParts, MatchedPath};
use axum::http::{Method, request};
use chrono::{DateTime, TimeDelta, Utc};
use domain::authz::{self, Action, Grant, Role, authorize};
use domain::bindings::Bindings;
use domain::machine::Command as _;
use domain::policy::Scopes;
use domain::{CommandId, Kind, Machine, Principal};
use std::marker::PhantomData;
use uuid::Uuid;

use crate::answer::{Explain, not_answered};
use crate::auth::{ADMIN, Acting, Caller};
use crate::body::refuse_query;
use crate::correlation::Scope;
use crate::error::{ApiError, Code};
use crate::idempotency::keyed::Keyed;
use crate::idempotency::{IdempotencyKey, Replayed, RequestLine};
use crate::services::Services;

use super::routing::{KeyRequired, NoQuery};
use super::stored::find;

/// How long a machine may take to answer.
const ASK_WITHIN: TimeDelta = TimeDelta::seconds(8);
/// How far back the transition that a repeated command made is looked for.
const LOOK_BACK: u32 = 1000;

/// A request by somebody with the role `user` or `admin`.
pub(crate) struct ByUser(pub(crate) Asking);

/// Somebody with the role `user` or `admin`, as their token names them: for what lasts longer than a request.
pub(crate) struct Person(pub(crate) Caller);

/// A request by an administrator.
pub(crate) struct ByAdmin(pub(crate) Asking);

/// A request by somebody whom the table of permissions lets do `R`. Where the token's roles are not enough, the platform roles of the
/// caller are read from Postgres, at every request.
pub(crate) struct May<R> {
    pub(crate) asking: Asking,
    right: PhantomData<R>,
}

/// Names an [`Action`] in a handler's signature.
pub(crate) trait Right {
    const ACTION: Action;
}

macro_rules! rights {
    ($($name:ident),+ $(,)?) => {$(
        pub(crate) enum $name {}

        impl Right for $name {
            const ACTION: Action = Action::$name;
        }
    )+};
}

rights! { AdjustBilling, SeeBilling, SettleProcessorEvents, SeeSkus, ApproveSkus, BindPlatformRoles, ReadAudit, RotateKeys }

/// Everything about a request but its command.
pub(crate) struct Asking {
    pub(crate) caller: authz::Caller,
    pub(crate) token_expires_at: DateTime<Utc>,
    /// The service account that asks, where it is one.
    pub(crate) acting: Option<Acting>,
    /// The user's own address; none of a service account.
    pub(crate) verified_email: Option<String>,
    services: Services,
    scope: Scope,
    key: Option<IdempotencyKey>,
    /// Of the route's key, or new where the client gave none.
    command_id: CommandId,
    keyed: Keyed,
    urgent: bool,
}

impl FromRequestParts<Services> for ByUser {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut request::Parts, services: &Services) -> Result<Self, ApiError> {
        let caller = within_limit(parts, services).await?;
        let asking = Asking::of(caller, parts, services).await?;
        has_a_role(&asking.caller)?;
        asking.with_its_key(parts).map(Self)
    }
}

impl FromRequestParts<Services> for Person {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut request::Parts, services: &Services) -> Result<Self, ApiError> {
        let caller = within_limit(parts, services).await?;
        has_a_role(&known(caller.clone()))?;
        Ok(Self(caller))
    }
}

fn has_a_role(caller: &authz::Caller) -> Result<(), ApiError> {
    if caller.roles.is_empty() {
        return Err(ApiError::forbidden(
            "Your account has neither the role `user` nor `admin`; ask an administrator for one.",
        ));
    }
    Ok(())
}

impl FromRequestParts<Services> for ByAdmin {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut request::Parts, services: &Services) -> Result<Self, ApiError> {
        let crate::auth::Admin(caller) = within_limit(parts, services).await?.into_admin()?;
        Asking::of(caller, parts, services).await?.with_its_key(parts).map(Self)
    }
}

impl<R: Right> FromRequestParts<Services> for May<R> {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut request::Parts, services: &Services) -> Result<Self, ApiError> {
        let caller = within_limit(parts, services).await?;
        let asking = Asking::of(caller, parts, services).await?.permitted(R::ACTION).await?.with_its_key(parts)?;
        Ok(Self { asking, right: PhantomData })
    }
}

/// The platform roles of a subject, as Postgres has them now; `None` where it never had any.
pub(super) async fn granted(services: &Services, subject: &str) -> Result<Option<Grant>, ApiError> {
    let id = id_of_name(Kind::Bindings, subject);
    Ok(find::<Bindings>(services, id).await?.map(|stored| stored.it.grant(id, stored.version)))
}

/// Names the roles that would be enough.
fn refusal(action: Action) -> ApiError {
    let roles: Vec<_> = action.platform_roles().iter().map(|role| role.name()).collect();
    if roles.is_empty() {
        return ApiError::forbidden("This route needs the role `admin`.");
    }
    let admin = if action.admits_administrators() { "the role `admin` or " } else { "" };
    let roles = roles.join("` or `");
    ApiError::forbidden(format!(
        "This needs {admin}the platform role `{roles}`; ask an administrator to bind it to you."
    ))
}

/// Whoever asks, known by their token and within the limit of the route's group.
async fn within_limit(parts: &mut request::Parts, services: &Services) -> Result<Caller, ApiError> {
    let (policy, now) = (services.world.policy(), services.world.now());
    let caller = match Caller::from_request_parts(parts, services).await {
        Ok(caller) => caller,
        Err(error) => {
            if error.code() == Code::Unauthenticated {
                services.limiter.token_refused(parts, &policy, now)?;
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
    services.limiter.take(parts.extensions.get(), &scopes, &policy, now).await?;
    if parts.extensions.get::<NoQuery>().is_some() {
        refuse_query(&parts.uri)?;
    }
    Ok(caller)
}

/// The caller as the machines know callers: of the roles in the token, those that mean something here.
fn known(caller: Caller) -> authz::Caller {
    let role = |name: &String| match name.as_str() {
        ADMIN => Some(Role::Admin),
        "user" => Some(Role::User),
        _ => None,
    };
    authz::Caller {
        roles: caller.roles.iter().filter_map(role).collect(),
        user_id: caller.user_id,
        org_id: caller.org_id,
        project_id: caller.project_id,
        plan: caller.plan,
        grant: None,
        service_account: caller.acting.as_ref().map(|acting| acting.account),
    }
}

impl Asking {
    /// With the key that its route asks for. To be looked at after the caller: who may not do it is not told how it is done.
    fn with_its_key(self, parts: &request::Parts) -> Result<Self, ApiError> {
        if self.key.is_none() && parts.extensions.get::<KeyRequired>().is_some() {
            return Err(IdempotencyKey::required());
        }
        Ok(self)
    }

    async fn of(caller: Caller, parts: &mut request::Parts, services: &Services) -> Result<Self, ApiError> {
        let route = parts.extensions.get::<MatchedPath>().map(|path| path.as_str().to_owned());
        let line = RequestLine {
            method: parts.method.clone(),
            route: route.ok_or_else(|| ApiError::internal("a handler runs outside of its route"))?,
            path: parts.uri.path().to_owned(),
        };
        let key = if parts.method == Method::POST { IdempotencyKey::of(&parts.headers)? } else { None };
        let (token_expires_at, acting) = (caller.token_expires_at, caller.acting.clone());
        let verified_email = caller.verified_email.clone();
        let caller = known(caller);
        let by = Principal::Caller(caller.clone());
        let command_id = key.as_ref().map_or_else(|| CommandId(Uuid::new_v4()), |key| line.command_id(&by, key));
        let keyed = parts.extensions.get::<Keyed>().cloned().unwrap_or_default();
        if key.is_some() {
            keyed.sent_by(command_id, line, services);
        }
        Ok(Self {
            token_expires_at,
            acting,
            verified_email,
            key,
            caller,
            services: services.clone(),
            scope: Scope::from_request_parts(parts, services).await?,
            command_id,
            keyed,
            urgent: false,
        })
    }

    /// As somebody who may do `action`, by their token or by the platform roles that Postgres has for them now.
    ///
    /// # Errors
    /// `forbidden`, with what would be enough.
    pub(crate) async fn permitted(mut self, action: Action) -> Result<Self, ApiError> {
        let suffices = |asking: &Self| authorize(&asking.principal(), action);
        if suffices(&self).is_err() {
            if !action.platform_roles().is_empty() && self.caller.service_account.is_none() {
                self.caller.grant = granted(&self.services, &self.caller.user_id).await?;
            }
            suffices(&self).map_err(|denied| refusal(action).because(denied))?;
        }
        Ok(self)
    }

    /// Let in where others are turned away: releases and what operators do.
    pub(crate) fn urgently(mut self) -> Self {
        self.urgent = true;
        self
    }

    pub(crate) fn principal(&self) -> Principal {
        Principal::Caller(self.caller.clone())
    }

    pub(crate) fn is_admin(&self) -> bool {
        self.caller.roles.contains(&Role::Admin)
    }

    pub(crate) fn scopes(&self) -> Scopes {
        Scopes::from(&self.caller)
    }

    /// The id of what this request creates. A repetition makes another one in the same shard, where it meets the first.
    pub(crate) fn id_of_new(&self) -> Uuid {
        id_created_by(self.command_id, self.services.world.now())
    }

    /// True of the id of something that this request makes, or made when it came first.
    pub(crate) fn has_made(&self, id: Uuid) -> bool {
        // The ids of one command differ in their times alone, the first 48 of the bits.
        let of_command = |id: Uuid| id.as_u128() << 48;
        of_command(id) == of_command(self.id_of_new())
    }

    /// The machine's reply to an earlier request with this key, where that was committed and its answer was lost. Who has to resolve something
    /// before asking looks here first: what was there then may be gone.
    ///
    /// # Errors
    /// `internal_error` where the reply cannot be read.
    pub(crate) fn carried_out<M: Machine>(&self) -> Result<Option<Answered<M::Reply>>, ApiError> {
        let Some(reply) = self.keyed.earlier_reply() else { return Ok(None) };
        let reply = serde_json::from_str(reply).map_err(ApiError::internal)?;
        self.keyed.is_committed();
        // The version is read where it is shown ([`Asking::version_of`]).
        Ok(Some(Answered { reply, replayed: true, written: false, version: 0 }))
    }

    /// True where [`Asking::carried_out`] has a reply.
    pub(crate) fn is_repetition(&self) -> bool {
        self.keyed.earlier_reply().is_some()
    }

    /// What is answered to this request is found out again at each repetition, since it is a secret.
    pub(crate) fn answer_changes(&self) {
        self.keyed.answer_changes();
    }

    /// Asks `command` of an entity, once however often the request comes.
    pub(crate) async fn ask<M: Machine>(&self, id: Uuid, command: M::Command) -> Result<Answered<M::Reply>, ApiError>
    where
        M::Rejection: Explain,
    {
        self.try_ask::<M>(id, command).await?.map_err(not_answered)
    }

    /// As [`Asking::ask`], for those who answer a refusal in their own words.
    pub(crate) async fn try_ask<M: Machine>(
        &self,
        id: Uuid,
        command: M::Command,
    ) -> Result<Result<Answered<M::Reply>, AskError<M::Rejection>>, ApiError> {
        if let Some(answered) = self.carried_out::<M>()? {
            return Ok(Ok(answered));
        }
        let key = self.keyed.command()?;
        let answer = self.send::<M>(id, command, |asked| match key {
            Some(key) => asked.once(key),
            None => asked,
        });
        let answer = answer.await?;
        if answer.as_ref().is_ok_and(|answered| answered.written || answered.replayed) {
            self.keyed.is_committed();
        }
        Ok(answer)
    }

    /// Asks a command whose answer is a secret: nothing of it is kept, so a repetition is a new command.
    pub(crate) async fn ask_unstored<M: Machine>(
        &self,
        id: Uuid,
        command: M::Command,
    ) -> Result<Answered<M::Reply>, ApiError>
    where
        M::Rejection: Explain,
    {
        self.try_ask_unstored::<M>(id, command).await?.map_err(not_answered)
    }

    /// As [`Asking::ask_unstored`], for those who answer a refusal in their own words.
    pub(crate) async fn try_ask_unstored<M: Machine>(
        &self,
        id: Uuid,
        command: M::Command,
    ) -> Result<Result<Answered<M::Reply>, AskError<M::Rejection>>, ApiError>
    where
        M::Rejection: Explain,
    {
        self.send::<M>(id, command, |asked| asked).await
    }

    /// Tells a machine what follows from the request beside what was asked, as the part `part` of the service.
    pub(crate) async fn tell_as_system<M: Machine>(
        &self,
        part: &str,
        id: Uuid,
        command: M::Command,
    ) -> Result<Answered<M::Reply>, AskError<M::Rejection>> {
        let permit = authorize(&Principal::system(part), command.action())
            .map_err(|denied| AskError::Unavailable { reason: denied.to_string() })?;
        let asked = self.scope.asked(&permit, self.services.world.now() + ASK_WITHIN);
        self.services.directory.ask::<M>(&permit, id, command, asked).await
    }

    async fn send<M: Machine>(
        &self,
        id: Uuid,
        command: M::Command,
        once: impl FnOnce(Asked) -> Asked,
    ) -> Result<Result<Answered<M::Reply>, AskError<M::Rejection>>, ApiError> {
        self.scope.record_resource(format_args!("{}/{id}", M::KIND));
        let permit = authorize(&self.principal(), command.action()).map_err(|denied| {
            let message = match &self.acting {
                Some(_) => "A service account may not do this; log in as a person who may.",
                None => "Your role does not allow this; ask an administrator.",
            };
            ApiError::forbidden(message).because(denied)
        })?;
        let deadline = self.services.world.now() + ASK_WITHIN;
        let asked = once(self.scope.asked(&permit, deadline));
        let asked = if self.urgent { asked.urgently() } else { asked };
        Ok(self.services.directory.ask::<M>(&permit, id, command, asked).await)
    }

    /// The version that the command led to and when: for a repeated command those of its first time.
    pub(crate) async fn led_to<R>(&self, id: Uuid, answered: &Answered<R>) -> Result<(i64, DateTime<Utc>), ApiError> {
        let reads = &self.services.reads;
        let found = if answered.replayed {
            let id_of_command = self.command_id;
            let rows = reads.history(id, None, LOOK_BACK).await?.items;
            rows.into_iter().find(|row| row.command_id == Some(id_of_command))
        } else {
            reads.history(id, Some(answered.version.saturating_add(1)), 1).await?.items.pop()
        };
        Ok(found.map_or_else(|| (answered.version, self.services.world.now()), |row| (row.version, row.at)))
    }

    /// The version alone, which a first answer knows without reading.
    pub(crate) async fn version_of<R>(&self, id: Uuid, answered: &Answered<R>) -> Result<i64, ApiError> {
        if answered.replayed { Ok(self.led_to(id, answered).await?.0) } else { Ok(answered.version) }
    }
}

/// The header of a repeated answer.
pub(crate) const fn replayed<R>(answered: &Answered<R>) -> Replayed {
    Replayed(answered.replayed)
}
