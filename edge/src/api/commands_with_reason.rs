//! Operators' commands that take a reason and nothing else: one handler for each row of a noun's table.

/// Handlers of a noun's commands. The head has the caller's extractor, the function that executes a command and responds, and the
/// response's status, description and schema; a row has a handler's description, its name and the command.
macro_rules! reason_commands {
    (
        $request:ty, $execute:ident => $status:tt $description:tt $view:ident;
        $($(#[doc = $doc:tt])+ $name:ident: $command:ident;)+
    ) => {$(
        $(#[doc = $doc])+
        #[utoipa::path(
            post,
            path = "/",
            request_body = ReasonBody,
            responses((status = $status, description = $description, body = $view)),
        )]
        pub(super) async fn $name(
            request: $request,
            State(app): State<AppState>,
            Path(id): Path<Uuid>,
            Idempotent(request_body::Json(body)): Idempotent<request_body::Json<ReasonBody>>,
        ) -> Result<Response, ApiError> {
            let asked = Request::$command { reason: body.reason.to_string() };
            $execute(&app, request.into(), id, asked).await
        }
    )+};
}

pub(super) use reason_commands;
