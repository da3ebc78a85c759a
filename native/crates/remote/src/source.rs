//! Ranges of one blob of a registry.
//!
//! A registry may answer itself or point elsewhere, to an address that is signed and
//! good for a while: it is remembered, asked without the registry's secret, and
//! dropped as soon as it refuses. Every answer is checked against what was asked for.

use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use crate::address::{self, Address};
use crate::answer::{self, Failure};
use crate::auth::{self, Challenge, Granted};
use crate::error::RemoteError;
use crate::http::{Http, NoReply, Reply};
use crate::logins::{Login, Logins};
use crate::stub::Stub;

/// Redirects followed for one request.
const MAX_HOPS: usize = 5;
/// How long the address behind a redirect is used without asking the registry.
const LOCATION_LIFETIME: Duration = Duration::from_secs(300);
/// First pause between two tries; doubled each time, with chance.
const FIRST_PAUSE: Duration = Duration::from_millis(100);
/// Longest pause that is our own idea.
const MAX_PAUSE: Duration = Duration::from_secs(5);
/// Largest range asked for at once.
pub const MAX_RANGE_BYTES: u64 = 4 << 20;

/// One blob of a registry.
pub struct Source {
    http: Arc<Http>,
    logins: Arc<Logins>,
    stub: Stub,
    granted: Mutex<Option<Granted>>,
    location: Mutex<Option<(Address, Instant)>>,
}

impl Source {
    /// A source; nothing is asked yet.
    pub fn new(http: Arc<Http>, logins: Arc<Logins>, stub: Stub) -> Source {
        Source {
            http,
            logins,
            stub,
            granted: Mutex::default(),
            location: Mutex::default(),
        }
    }

    /// What the stub says.
    pub fn stub(&self) -> &Stub {
        &self.stub
    }

    /// Reads a range inside the blob, at most [`MAX_RANGE_BYTES`], trying again for
    /// about `patience`.
    pub fn read(&self, range: Range<u64>, patience: Duration) -> Result<Vec<u8>, RemoteError> {
        let end = Instant::now() + patience;
        let mut pause = FIRST_PAUSE;
        let mut tries = 0;
        loop {
            tries += 1;
            let (reason, wanted) = match self.try_read(&range) {
                Ok(bytes) => return Ok(bytes),
                Err(Failure::Final(error)) => return Err(error),
                Err(Failure::Again(reason, wanted)) => (reason, wanted),
            };
            let wait = wanted.unwrap_or_else(|| pause.mul_f64(0.5 + fastrand::f64()));
            pause = (pause * 2).min(MAX_PAUSE);
            if Instant::now() + wait > end {
                let address = self.stub.address();
                return Err(RemoteError::Unavailable {
                    address,
                    tries,
                    reason,
                });
            }
            tracing::debug!(
                address = self.stub.address(),
                tries,
                reason,
                "reading again"
            );
            std::thread::sleep(wait);
        }
    }

    fn try_read(&self, range: &Range<u64>) -> Result<Vec<u8>, Failure> {
        if let Some(address) = self.known_location() {
            let reply = self.get(&address, range, None)?;
            if matches!(reply.status, 200 | 206 | 408 | 416 | 429 | 500..) {
                return answer::read(&self.stub, reply, range);
            }
            // It has expired, or moved: the registry knows where to.
            *self.location.lock() = None;
        }
        self.read_from_registry(range)
    }

    fn read_from_registry(&self, range: &Range<u64>) -> Result<Vec<u8>, Failure> {
        let origin = self.origin()?;
        let mut address = origin.clone();
        let mut has_renewed = false;
        for _ in 0..MAX_HOPS + 2 {
            let is_origin = address.same_origin(&origin);
            let header = if is_origin {
                self.authorization()
            } else {
                None
            };
            let reply = self.get(&address, range, header.clone())?;
            match reply.status {
                401 if is_origin && !has_renewed => {
                    has_renewed = true;
                    self.renew(&reply, header.as_deref(), &origin)?;
                }
                301 | 302 | 303 | 307 | 308 => address = self.next(&address, &reply)?,
                200 | 206 => {
                    if !is_origin {
                        *self.location.lock() = Some((address, Instant::now() + LOCATION_LIFETIME));
                    }
                    return answer::read(&self.stub, reply, range);
                }
                _ => return answer::read(&self.stub, reply, range),
            }
        }
        Err(Failure::wrong(
            &self.stub,
            format!("it leads through more than {MAX_HOPS} redirects"),
        ))
    }

    fn origin(&self) -> Result<Address, Failure> {
        address::parse(&self.stub.address())
            .ok_or_else(|| Failure::wrong(&self.stub, "it is no address".to_owned()))
    }

    fn known_location(&self) -> Option<Address> {
        let mut location = self.location.lock();
        if location
            .as_ref()
            .is_some_and(|(_, until)| *until < Instant::now())
        {
            *location = None;
        }
        location.as_ref().map(|(address, _)| address.clone())
    }

    fn next(&self, from: &Address, reply: &Reply<'_>) -> Result<Address, Failure> {
        let location = reply.header("location").unwrap_or_default();
        let next = address::join(from, location).ok_or_else(|| {
            Failure::wrong(&self.stub, "it redirects to no usable address".to_owned())
        })?;
        if from.is_secure && !next.is_secure {
            return Err(Failure::wrong(
                &self.stub,
                format!(
                    "it redirects from https to {}, which is not secure",
                    next.host
                ),
            ));
        }
        Ok(next)
    }

    fn get(
        &self,
        address: &Address,
        range: &Range<u64>,
        authorization: Option<String>,
    ) -> Result<Reply<'_>, Failure> {
        let mut headers = vec![("range", format!("bytes={}-{}", range.start, range.end - 1))];
        headers.extend(authorization.map(|value| ("authorization", value)));
        let reply = self
            .http
            .get(address, &headers, self.stub.check_certificate);
        reply.map_err(|no_reply| self.unanswered("", &no_reply))
    }

    /// The header to send now, if one was granted and lasts.
    fn authorization(&self) -> Option<String> {
        let granted = self.granted.lock();
        let lasting = granted
            .as_ref()
            .filter(|granted| granted.until > Instant::now());
        lasting.map(|granted| granted.header.clone())
    }

    /// Gets what the registry wants to see. One caller asks, others wait and use it.
    fn renew(
        &self,
        reply: &Reply<'_>,
        refused: Option<&str>,
        origin: &Address,
    ) -> Result<(), Failure> {
        let mut granted = self.granted.lock();
        let is_newer = |granted: &Granted| {
            Some(granted.header.as_str()) != refused && granted.until > Instant::now()
        };
        if granted.as_ref().is_some_and(is_newer) {
            return Ok(());
        }
        *granted = None;
        let headers = reply.headers.get_all("www-authenticate");
        let challenges = headers
            .iter()
            .filter_map(|value| value.to_str().ok())
            .flat_map(auth::parse_challenges);
        let login = self.logins.find(&self.stub.blobs_url);
        let mut reason = "it asks for a proof of an unknown kind".to_owned();
        for challenge in challenges {
            match (challenge, &login) {
                (
                    Challenge::Bearer {
                        realm,
                        service,
                        scope,
                    },
                    login,
                ) => {
                    let address = auth::token_address(&realm, service.as_deref(), scope.as_deref());
                    let secure = |address: &Address| address.is_secure || !origin.is_secure;
                    let Some(address) = address.filter(secure) else {
                        return Err(Failure::wrong(
                            &self.stub,
                            format!("its token server {realm:?} has no secure address"),
                        ));
                    };
                    *granted = Some(self.token(&address, login.as_ref().map(Login::basic))?);
                    return Ok(());
                }
                (Challenge::Basic, Some(login)) => {
                    *granted = Some(Granted {
                        header: login.basic(),
                        until: Instant::now() + LOCATION_LIFETIME,
                    });
                    return Ok(());
                }
                (Challenge::Basic, None) => {
                    reason = "it wants credentials, and none are known".to_owned()
                }
            }
        }
        Err(Failure::denied(&self.stub, reason))
    }

    fn token(&self, address: &Address, basic: Option<String>) -> Result<Granted, Failure> {
        let headers: Vec<_> = basic
            .into_iter()
            .map(|value| ("authorization", value))
            .collect();
        let reply = self
            .http
            .get(address, &headers, self.stub.check_certificate);
        let who = format!("token server {}: ", address.host);
        let mut reply = reply.map_err(|no_reply| self.unanswered(&who, &no_reply))?;
        match reply.status {
            200 => auth::read_token(reply.body.as_reader()).map_err(|reason| {
                Failure::Again(format!("token server {}: {reason}", address.host), None)
            }),
            408 | 429 | 500.. => Err(answer::again(&reply)),
            status => Err(Failure::denied(
                &self.stub,
                format!("its token server {} answers {status}", address.host),
            )),
        }
    }

    fn unanswered(&self, who: &str, no_reply: &NoReply) -> Failure {
        let reason = format!("{who}{}", no_reply.reason);
        if !no_reply.is_final {
            return Failure::Again(reason, None);
        }
        Failure::Final(RemoteError::Unavailable {
            address: self.stub.address(),
            tries: 1,
            reason,
        })
    }
}
