//! What can be rented.

use crate::api::Api;
use crate::failure::Failure;
use crate::out::Column;

#[derive(Debug, clap::Subcommand)]
pub(crate) enum Command {
    /// What is offered, with its price.
    #[command(visible_alias = "ls")]
    List {
        /// At most so many.
        #[arg(long, value_name = "N", default_value_t = 100, value_parser = clap::value_parser!(u16).range(1..=10000))]
        limit: u16,
    },
}

const OFFERED: [Column; 9] = [
    ("NAME", "/name"),
    ("GPU", "/gpu/model"),
    ("GPUS", "/gpu/count"),
    ("GPU MIB", "/gpu/memory_mib"),
    ("CORES", "/cpu/cores"),
    ("MIB", "/memory_mib"),
    ("REGIONS", "/allowed_regions"),
    ("MINOR PER GPU HOUR", "/price/amount_minor_per_gpu_hour"),
    ("CURRENCY", "/price/currency"),
];

pub(crate) async fn run(command: Command, api: &Api) -> Result<(), Failure> {
    match command {
        Command::List { limit } => {
            let page = api.list("/api/v1/skus", &[], limit.into()).await?;
            api.out.list(&page, &OFFERED)
        }
    }
}
