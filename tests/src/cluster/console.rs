//! A browser that is logged in to the web console: it fills in the identity provider's form, and sends the cookie as a page of ours does.

use super::TestCluster;
use super::client::Client;
use reqwest::header::{COOKIE, LOCATION, SET_COOKIE};
use reqwest::{Response, StatusCode, redirect};
use secrecy::ExposeSecret as _;
use uuid::Uuid;

const SESSION: &str = "__Host-gpuaas-session";

/// A logged-in browser.
pub struct ConsoleBrowser {
    /// Through the load balancer.
    pub client: Client,
    /// `name=value`.
    pub cookie: String,
    origin: String,
}

impl TestCluster {
    /// Logs this user in, through the load balancer.
    pub async fn log_in_to_console(&mut self, username: &str) -> ConsoleBrowser {
        let origin = self.settings.public_url.clone();
        let authority = std::fs::read(self.authority.certificate_path()).expect("the authority is there");
        let authority = reqwest::Certificate::from_pem_bundle(&authority).expect("a certificate");
        let http = reqwest::Client::builder()
            .tls_certs_only(authority)
            .redirect(redirect::Policy::none())
            .no_proxy()
            .build()
            .expect("a client can be made");
        let begun = http.get(format!("{origin}/console/login")).send().await.expect("an answer");
        assert_eq!(begun.status(), StatusCode::FOUND, "{begun:?}");
        let password = self.identity.person(username).expect("the user is known").password;
        let form = [("username", username), ("password", password.expose_secret())];
        let confirmed = http.post(location(&begun)).form(&form).send().await.expect("the provider answers");
        let back = http.get(location(&confirmed)).header(COOKIE, cookies(&begun)).send().await.expect("an answer");
        assert_eq!(back.status(), StatusCode::SEE_OTHER, "{:?}", back.text().await);
        let cookie = cookies(&back);
        let cookie = cookie.split("; ").find(|pair| pair.starts_with(SESSION)).expect("a session's cookie").to_owned();
        let secret = cookie.split_once('=').map(|(_, value)| value.to_owned());
        self.register_secret("the cookie of a login to the console", &secret.expect("a value"));
        let client = self.anonymous_client().by_cookie(&cookie, &origin);
        ConsoleBrowser { client, cookie, origin }
    }
}

impl ConsoleBrowser {
    /// The same browser at one replica.
    #[must_use]
    pub fn at(&self, cluster: &TestCluster, replica: usize) -> Client {
        let client = Client::new(cluster.authority.certificate_path(), &cluster.replicas[replica].public_url(), None);
        client.by_cookie(&self.cookie, &self.origin)
    }

    /// The headers of a WebSocket of a page of ours.
    #[must_use]
    pub fn headers(&self) -> [(&'static str, &str); 2] {
        [("cookie", &self.cookie), ("origin", &self.origin)]
    }

    pub async fn session_id(&self) -> Uuid {
        let me = self.client.get("/api/v1/me").await.ok();
        me["session"]["id"].as_str().expect("a session").parse().expect("an id")
    }
}

fn location(answer: &Response) -> String {
    answer.headers()[LOCATION].to_str().expect("an address").to_owned()
}

/// The cookies that the answer sets, as a browser sends them back.
fn cookies(answer: &Response) -> String {
    let lines = answer.headers().get_all(SET_COOKIE).iter().filter_map(|line| line.to_str().ok());
    lines.filter_map(|line| line.split(';').next()).collect::<Vec<_>>().join("; ")
}
