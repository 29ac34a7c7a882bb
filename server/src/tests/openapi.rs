//! The OpenAPI document against what it describes: the routes, and the fields that the wire types read.

use std::collections::BTreeSet;

use axum::body::Body;
use axum::http::Request;
use serde::de::value::Error;
use serde::de::{Deserialize, Deserializer, Error as _, Visitor};
use serde_json::Value;

use super::Server;
use crate::openai::chat::{ChatBody, TemplateBody};
use crate::openai::completions::CompletionBody;
use crate::openai::messages::{Message, Part};
use crate::openai::params::{SharedBody, StreamOptions};
use crate::routes::routes;
use crate::tokenize::{DetokenizeBody, TokenizeBody};

#[tokio::test]
async fn every_route_is_described_with_its_methods_and_nothing_else_is() {
    for enable_admin in [false, true] {
        let server = Server::with(|config, _| config.enable_admin = enable_admin);
        let document = server.get("/openapi.json").await.json();
        let mut described: BTreeSet<(String, String)> = BTreeSet::new();
        for (path, operations) in document["paths"].as_object().expect("paths") {
            let methods = operations.as_object().expect("operations").keys();
            described.extend(methods.map(|method| (path.clone(), method.clone())));
        }
        let mut served = BTreeSet::new();
        for (path, _) in routes(&server.state.config) {
            let path = path.replace("{*id}", "{id}");
            for method in ["get", "post", "put", "delete", "patch"] {
                let request =
                    Request::builder().method(method.to_uppercase().as_str()).uri(path.replace("{id}", "tiny"));
                let answer = server.send(request.body(Body::empty()).expect("a request")).await;
                if answer.status.as_u16() != 405 {
                    served.insert((path.clone(), method.to_owned()));
                }
            }
        }
        assert_eq!(described, served);
    }
}

/// The names that a type reads from an object: serde tells them to its deserializer.
fn fields_of<T: for<'de> Deserialize<'de>>() -> BTreeSet<&'static str> {
    struct Listen<'a>(&'a mut BTreeSet<&'static str>);

    impl<'de> Deserializer<'de> for Listen<'_> {
        type Error = Error;

        fn deserialize_any<V: Visitor<'de>>(self, _: V) -> Result<V::Value, Error> {
            Err(Error::custom("not a struct"))
        }

        fn deserialize_struct<V: Visitor<'de>>(
            self,
            _: &'static str,
            fields: &'static [&'static str],
            _: V,
        ) -> Result<V::Value, Error> {
            self.0.extend(fields);
            Err(Error::custom("heard enough"))
        }

        serde::forward_to_deserialize_any! {
            bool i8 i16 i32 i64 i128 u8 u16 u32 u64 u128 f32 f64 char str string bytes byte_buf option unit unit_struct
            newtype_struct seq tuple tuple_struct map enum identifier ignored_any
        }
    }

    let mut fields = BTreeSet::new();
    assert!(T::deserialize(Listen(&mut fields)).is_err());
    assert!(!fields.is_empty(), "a struct with named fields");
    fields
}

/// The properties of a schema, those of its `allOf` included.
fn properties(document: &Value, name: &str) -> BTreeSet<String> {
    let schema = &document["components"]["schemas"][name];
    let mut names: BTreeSet<String> = schema["properties"].as_object().expect("properties").keys().cloned().collect();
    for part in schema["allOf"].as_array().into_iter().flatten() {
        let part = part["$ref"].as_str().and_then(|path| path.rsplit('/').next()).expect("a reference");
        names.extend(properties(document, part));
    }
    names
}

#[tokio::test]
async fn every_field_of_a_body_is_described_and_no_other_is() {
    let document = Server::new().get("/openapi.json").await.json();
    let (shared, template) = (fields_of::<SharedBody>(), fields_of::<TemplateBody>());
    for (name, fields) in [
        ("ChatRequest", &(&shared | &template) | &fields_of::<ChatBody>()),
        ("CompletionRequest", &shared | &fields_of::<CompletionBody>()),
        ("TokenizeRequest", &template | &fields_of::<TokenizeBody>()),
        ("DetokenizeRequest", fields_of::<DetokenizeBody>()),
        ("StreamOptions", fields_of::<StreamOptions>()),
        ("Message", fields_of::<Message>()),
        ("Part", fields_of::<Part>()),
    ] {
        assert_eq!(
            properties(&document, name),
            fields.into_iter().map(str::to_owned).collect::<BTreeSet<_>>(),
            "{name}"
        );
    }
}

#[tokio::test]
async fn keys_are_described_where_they_are_needed() {
    let open = Server::new().get("/openapi.json").await.json();
    assert_eq!(open["paths"]["/v1/models"]["get"].get("security"), None);
    let guarded = Server::with(|config, _| config.api_keys = vec!["key".into()]);
    let document = guarded.get("/openapi.json").await.json();
    for (path, operations) in document["paths"].as_object().expect("paths") {
        for (method, operation) in operations.as_object().expect("operations") {
            let request = Request::builder().method(method.to_uppercase().as_str()).uri(path.replace("{id}", "tiny"));
            let answer = guarded.send(request.body(Body::empty()).expect("a request")).await;
            assert_eq!(operation.get("security").is_some(), answer.status.as_u16() == 401, "{method} {path}");
        }
    }
}
